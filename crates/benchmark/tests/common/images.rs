//! Images as others have them: how an endpoint pulls one from a registry, and how one is saved in a directory.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;

use aws_lc_rs::digest::{SHA256, digest};
use serde_json::{Value, json};

/// How an endpoint asks registries.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Pulls {
    /// Not at all: every image is there at once.
    #[default]
    Never,
    /// By TLS and in no other way, as CRI-O does unless its configuration says otherwise.
    Https,
    /// In plain HTTP.
    Http,
}

/// What a client that is written in Go says of a registry without TLS.
pub const NO_TLS: &str = "server gave HTTP response to HTTPS client";

/// Pulls an image; the digests of all that it consists of, or what the endpoint says that went wrong.
pub fn pull(image: &str, how: Pulls) -> Result<Vec<String>, String> {
    let (host, name) = image.split_once('/').unwrap();
    match how {
        Pulls::Never => Ok(Vec::new()),
        Pulls::Https if answers_plainly(host) => Err(format!(
            "pinging container registry {host}: Get \"https://{host}/v2/\": http: {NO_TLS}"
        )),
        Pulls::Https => Err(format!("pinging container registry {host}: EOF")),
        Pulls::Http => Ok(fetched(host, name)),
    }
}

/// Whether the answer to a greeting of TLS is one of HTTP. The greeting has no end of a line in it.
fn answers_plainly(host: &str) -> bool {
    let mut stream = TcpStream::connect(host).unwrap();
    stream
        .write_all(&[&[0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3][..], &[0xa5; 506]].concat())
        .unwrap();
    let mut answer = [0; 5];
    stream.read_exact(&mut answer).is_ok() && &answer == b"HTTP/"
}

fn fetched(host: &str, name: &str) -> Vec<String> {
    let (name, tag) = name.rsplit_once(':').unwrap();
    let manifest = get(host, &format!("/v2/{name}/manifests/{tag}"));
    let mut all = vec![sha256(&manifest)];
    let manifest: Value = serde_json::from_slice(&manifest).unwrap();
    let layers = manifest["layers"].as_array().unwrap().iter();
    for one in layers.chain([&manifest["config"]]) {
        let wanted = one["digest"].as_str().unwrap();
        let blob = get(host, &format!("/v2/{name}/blobs/{wanted}"));
        assert_eq!(
            (sha256(&blob).as_str(), blob.len() as u64),
            (wanted, one["size"].as_u64().unwrap())
        );
        all.push(wanted.to_owned());
    }
    all
}

fn get(host: &str, path: &str) -> Vec<u8> {
    let mut stream = BufReader::new(TcpStream::connect(host).unwrap());
    write!(stream.get_mut(), "GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n").unwrap();
    let head: Vec<String> =
        stream.by_ref().lines().map(Result::unwrap).take_while(|line| !line.is_empty()).collect();
    assert!(head[0].ends_with(" 200 OK"), "{path}: {head:?}");
    let length = head.iter().find_map(|line| line.strip_prefix("Content-Length: ")).unwrap();
    let mut body = vec![0; length.parse().unwrap()];
    stream.read_exact(&mut body).unwrap();
    body
}

/// A digest as images write it.
pub fn sha256(bytes: &[u8]) -> String {
    let sum = digest(&SHA256, bytes);
    let digits: String = sum.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{digits}")
}

/// Saves an image of one layer, an archive of tar, in the OCI image layout; the digest of its manifest.
pub fn save(dir: &Path, layer: &[u8]) -> String {
    let blobs = dir.join("blobs/sha256");
    fs::create_dir_all(&blobs).unwrap();
    let add = |kind: &str, content: &[u8]| {
        let digest = sha256(content);
        fs::write(blobs.join(digest.strip_prefix("sha256:").unwrap()), content).unwrap();
        json!({
            "mediaType": format!("application/vnd.oci.image.{kind}"),
            "digest": digest,
            "size": content.len(),
        })
    };
    let architecture = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
    let config = json!({
        "architecture": architecture, "os": "linux", "config": {},
        "rootfs": { "type": "layers", "diff_ids": [sha256(layer)] },
    });
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": add("config.v1+json", config.to_string().as_bytes()),
        "layers": [add("layer.v1.tar", layer)],
    });
    let manifest = add("manifest.v1+json", manifest.to_string().as_bytes());
    let digest = manifest["digest"].as_str().unwrap().to_owned();
    let index = json!({ "schemaVersion": 2, "manifests": [manifest] });
    fs::write(dir.join("index.json"), index.to_string()).unwrap();
    fs::write(dir.join("oci-layout"), "{\"imageLayoutVersion\":\"1.0.0\"}").unwrap();
    digest
}
