//! Two daemons of one pool, that show each other certificates.

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};
use torpor_runtimes_tests::port;

use super::{Daemon, shown};

fn openssl(dir: &Path, args: &[&str]) {
    let output = Command::new("openssl").args(args).current_dir(dir).output().unwrap();
    assert!(output.status.success(), "{}", shown(&output));
}

/// An authority, a certificate for localhost of it, and one of another authority.
fn certificates(dir: &Path) {
    let curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"];
    for ca in ["ca", "other"] {
        let mut args = vec!["req", "-x509", "-subj", "/CN=pool"];
        args.extend(curve);
        let (key, pem) = (format!("{ca}.key"), format!("{ca}.pem"));
        args.extend(["-keyout", &key, "-out", &pem]);
        openssl(dir, &args);
    }
    let mut args = vec!["req", "-subj", "/CN=localhost", "-keyout", "key", "-out", "request"];
    args.extend(curve.iter().filter(|word| !["-days", "2"].contains(word)));
    openssl(dir, &args);
    std::fs::write(dir.join("extensions"), "subjectAltName=DNS:localhost\n").unwrap();
    for (ca, out) in [("ca", "certificate"), ("other", "wrong")] {
        let (key, pem) = (format!("{ca}.key"), format!("{ca}.pem"));
        openssl(
            dir,
            &[
                "x509",
                "-req",
                "-in",
                "request",
                "-CA",
                &pem,
                "-CAkey",
                &key,
                "-CAcreateserial",
                "-days",
                "2",
                "-extfile",
                "extensions",
                "-out",
                out,
            ],
        );
    }
}

/// Two daemons, each the other's only peer.
pub fn pair(dir: &Path, config: &Value) -> [Daemon; 2] {
    pair_with(dir, config, &[])
}

/// Two daemons, the first of them with more options.
pub fn pair_with(dir: &Path, config: &Value, of_first: &[&str]) -> [Daemon; 2] {
    certificates(dir);
    let ports = [port::free(), port::free()];
    let at = |name: &str| dir.join(name).to_str().unwrap().to_owned();
    let start = |own: usize, name: &str, other: usize| {
        let mut config = config.clone();
        config["pool"] = json!({ name: format!("https://localhost:{}", ports[other]) });
        let (listen, of_first) = (format!("https://localhost:{}", ports[own]), of_first.iter());
        let (certificate, key, ca) = (at("certificate"), at("key"), at("ca.pem"));
        let mut options = vec!["--listen", &listen, "--tls-cert", &certificate];
        options.extend(["--tls-key", &key, "--tls-ca", &ca]);
        options.extend(of_first.filter(|_| own == 0));
        Daemon::configured(&config, &options)
    };
    [start(0, "b", 1), start(1, "a", 0)]
}
