//! An authority of its own for one test, with those who sign in its name.

use std::path::PathBuf;
use std::process::Command;

use crate::fixture::{Fixture, shown};

/// An authority, whose files lie in the fixture of a test.
pub struct Authority {
    dir: PathBuf,
    name: String,
}

impl Authority {
    pub fn new(fixture: &Fixture, name: &str) -> Self {
        let authority = Self { dir: fixture.dir.path().to_owned(), name: name.to_owned() };
        authority.make(name, &["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]);
        authority
    }

    /// A key and its certificate.
    fn make(&self, name: &str, more: &[&str]) {
        let mut openssl = Command::new("openssl");
        openssl.args(["req", "-x509", "-noenc", "-subj", &format!("/CN={name}")]);
        openssl.args(["-keyout", &format!("{name}.key"), "-out", &format!("{name}.crt")]);
        let output = openssl.args(more).current_dir(&self.dir).output().unwrap();
        assert!(output.status.success(), "{}", shown(&output));
    }

    fn file(&self, name: &str) -> String {
        self.dir.join(name).display().to_string()
    }

    pub fn certificate(&self) -> String {
        self.file(&format!("{}.crt", self.name))
    }

    /// The key and the certificate of somebody who signs.
    pub fn signer(&self, name: &str) -> (String, String) {
        let (ca, ca_key) = (format!("{}.crt", self.name), format!("{}.key", self.name));
        let from = ["-CA", &ca, "-CAkey", &ca_key, "-newkey", "ed25519"];
        let is_leaf = ["-addext", "basicConstraints=critical,CA:FALSE"];
        let signs = ["-addext", "keyUsage=critical,digitalSignature"];
        self.make(name, &[&from[..], &is_leaf, &signs].concat());
        (self.file(&format!("{name}.key")), self.file(&format!("{name}.crt")))
    }
}
