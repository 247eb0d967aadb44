//! What people do today: a plain dump, and a tool over every image file in a post-dump
//! action script.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::Result;

/// The tools, with their command for `$f`, which leaves `$f.sealed`.
pub const TOOLS: [(&str, &str); 3] = [
    (
        "openssl",
        "openssl enc -aes-256-cbc -pbkdf2 -pass file:\"$key\" -in \"$f\" -out \"$f.sealed\"",
    ),
    (
        "gpg",
        "gpg --homedir \"$home\" --batch --quiet --symmetric --cipher-algo AES256 --compress-algo none \
         --passphrase-file \"$key\" --output \"$f.sealed\" \"$f\"",
    ),
    ("age", "age --encrypt --identity \"$home/age.key\" --output \"$f.sealed\" \"$f\""),
];

/// Writes the action script that seals all files with a tool, and gives its path. It begins
/// no further file when it has taken `patience` seconds.
pub fn script(dir: &Path, name: &str, command: &str, patience: u64) -> Result<PathBuf> {
    let home = dir.join("tools");
    if !home.exists() {
        fs::create_dir(&home)?;
        fs::set_permissions(&home, Permissions::from_mode(0o700))?;
        fs::write(home.join("key"), "correct horse battery staple\n")?;
        let identity = home.join("age.key");
        crate::bench::run(std::process::Command::new("age-keygen").arg("-o").arg(identity))?;
    }
    let path = home.join(name);
    let text = format!(
        "#!/bin/bash\nset -e\n[ \"$CRTOOLS_SCRIPT_ACTION\" = post-dump ] || exit 0\n\
         home='{home}' key='{home}/key'\ncd \"$CRTOOLS_IMAGE_DIR\"\n\
         for f in *; do\n\t[ $SECONDS -lt {patience} ] || exit 0\n\t{command}\n\trm \"$f\"\ndone\n",
        home = home.display()
    );
    fs::write(&path, text)?;
    fs::set_permissions(&path, Permissions::from_mode(0o700))?;
    Ok(path)
}
