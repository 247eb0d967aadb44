//! `interchange DIR…`: compares how Debian's `crit` and Torpor's read the images in each directory.

use std::path::Path;
use std::process::ExitCode;

use torpor_tests::interchange;

fn main() -> anyhow::Result<ExitCode> {
    let mut failed = false;
    for dir in std::env::args_os().skip(1) {
        let report = interchange::compare(Path::new(&dir))?;
        for text in &report.skipped {
            println!("skipped {text}");
        }
        for text in &report.differences {
            println!("differs {text}");
        }
        println!("{}: {} images are read alike", dir.display(), report.same);
        failed |= !report.differences.is_empty();
    }
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
