//! The images of the benchmark, made here from programs of this machine and laid out as a registry
//! serves them. No other registry is asked for anything.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};

use crate::digest::{Digest, of_bytes};
use crate::{layout, own, program};

/// The image with busybox alone: what sandboxes and idle containers run.
pub(crate) const BASE: &str = "torpor-benchmark/base";
/// The image with the programs that measure.
pub(crate) const TOOLS: &str = "torpor-benchmark/tools";
/// The image that is pulled and removed again. It shares no layer with the others.
pub(crate) const PULLED: &str = "torpor-benchmark/pulled";
/// The one tag that all of them have.
pub(crate) const TAG: &str = "1";

/// Where this program lies in the image of tools.
pub(crate) const PROGRAM: &str = "/bin/torpor-benchmark";

/// How long the programs may take that help to make the images.
const PATIENCE: Duration = Duration::from_secs(60);

/// How much the image that is pulled holds.
pub(crate) const PULLED_BYTES: usize = 16 << 20;

/// What could not be put in an image.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// A file could not be read or written.
    #[error("{path}: {error}")]
    File {
        /// The file.
        path: PathBuf,
        /// What went wrong.
        #[source]
        error: io::Error,
    },
    /// A program that the images are made of is not installed.
    #[error("{0} is not installed: the images are made of it (Debian: apt-get install {1})")]
    Missing(&'static str, &'static str),
    /// The directory that is to be pulled holds no image for this machine, or several.
    #[error("{0}: {1}")]
    Layout(PathBuf, String),
}

pub(crate) fn at(path: &Path) -> impl FnOnce(io::Error) -> ImageError + use<> {
    let path = path.to_owned();
    move |error| ImageError::File { path, error }
}

/// What the images hold that not all have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Contents {
    /// Whether `sysbench` is in the image of tools.
    pub sysbench: bool,
    /// What is pulled, if that is not made here.
    pub pulled: Option<String>,
}

/// Makes all images in `store`, the directory of a registry; with `pulled`, a directory in the OCI image layout, the one
/// that is pulled is from there.
///
/// # Errors
/// If a file cannot be read or written, busybox is not there, or `pulled` holds no image for this machine.
pub(crate) fn build(store: &Path, pulled: Option<&Path>) -> Result<Contents, ImageError> {
    fs::create_dir_all(store.join("blobs")).map_err(at(store))?;
    let busybox = find("busybox").ok_or(ImageError::Missing("busybox", "busybox-static"))?;
    let base = Layer::write(store, Compression::none(), |layer| base_files(layer, &busybox))?;
    let sysbench = find("sysbench");
    let tools = Layer::write(store, Compression::none(), |layer| {
        layer.program(&own::executable()?, PROGRAM, Some(store))?;
        if let Some(sysbench) = &sysbench {
            layer.program(sysbench, "/usr/bin/sysbench", None)?;
        }
        Ok(())
    })?;
    let sleep = ["/bin/sleep", "2147483647"];
    manifest(store, BASE, &[&base], &sleep)?;
    manifest(store, TOOLS, &[&base, &tools], &sleep)?;
    let pulled = match pulled {
        Some(layout) => Some(layout::put(layout, store)?),
        None => {
            manifest(store, PULLED, &[&to_pull(store)?], &["/none"])?;
            None
        }
    };
    Ok(Contents { sysbench: sysbench.is_some(), pulled })
}

/// What is pulled where nothing else is named. Half of it can be compressed, as programs can.
fn to_pull(store: &Path) -> Result<Written, ImageError> {
    Layer::write(store, Compression::fast(), |layer| {
        let mut random = fastrand::Rng::with_seed(1);
        for number in 0..64 {
            let mut content = vec![0; PULLED_BYTES / 64];
            random.fill(&mut content[..PULLED_BYTES / 128]);
            layer.bytes(&format!("data/{number}"), &content, 0o644)?;
        }
        Ok(())
    })
}

fn base_files(layer: &mut Layer, busybox: &Path) -> Result<(), ImageError> {
    for dir in ["bin", "etc", "proc", "sys", "dev", "out"] {
        layer.dir(dir, 0o755)?;
    }
    layer.dir("tmp", 0o1777)?;
    layer.bytes("etc/passwd", b"root:x:0:0:root:/:/bin/sh\n", 0o644)?;
    layer.file(busybox, "bin/busybox")?;
    for applet in ["sh", "sleep", "true", "cat", "dd", "head"] {
        layer.link(&format!("bin/{applet}"), "busybox")?;
    }
    Ok(())
}

/// A program on the PATH or in the system's own directories, which a PATH may lack.
#[must_use]
pub(crate) fn find(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let system = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"];
    std::env::split_paths(&path)
        .chain(system.iter().map(PathBuf::from))
        .map(|dir| dir.join(name))
        .find(|file| file.is_file())
}

/// One layer of an image, while it is written.
struct Layer {
    tar: tar::Builder<Tee>,
    seen: BTreeSet<PathBuf>,
}

/// A layer that is complete.
struct Written {
    digest: String,
    size: u64,
    diff_id: String,
}

/// Compresses, and computes the sum of what comes in.
struct Tee {
    out: GzEncoder<File>,
    plain: Digest,
}

impl Write for Tee {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = self.out.write(bytes)?;
        self.plain.update(&bytes[..taken]);
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

impl Layer {
    fn write(
        store: &Path,
        compression: Compression,
        fill: impl FnOnce(&mut Self) -> Result<(), ImageError>,
    ) -> Result<Written, ImageError> {
        let path = store.join("layer.new");
        let out = GzEncoder::new(File::create(&path).map_err(at(&path))?, compression);
        let tar = tar::Builder::new(Tee { out, plain: Digest::new() });
        let mut layer = Self { tar, seen: BTreeSet::new() };
        fill(&mut layer)?;
        let tee = layer.tar.into_inner().map_err(at(&path))?;
        tee.out.finish().map_err(at(&path))?;
        let content = fs::read(&path).map_err(at(&path))?;
        let digest = of_bytes(&content);
        let place = blob(store, &digest);
        fs::rename(&path, &place).map_err(at(&place))?;
        let size = u64::try_from(content.len()).unwrap_or(u64::MAX);
        Ok(Written { digest, size, diff_id: tee.plain.finish() })
    }

    fn entry(
        &mut self,
        name: &str,
        header: &mut tar::Header,
        data: &[u8],
    ) -> Result<(), ImageError> {
        if !self.seen.insert(PathBuf::from(name)) {
            return Ok(());
        }
        header.set_mtime(0);
        header.set_uid(0);
        header.set_gid(0);
        header.set_size(u64::try_from(data.len()).unwrap_or(u64::MAX));
        self.tar.append_data(header, name, data).map_err(at(Path::new(name)))
    }

    fn dir(&mut self, name: &str, mode: u32) -> Result<(), ImageError> {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Directory);
        header.set_mode(mode);
        self.entry(name, &mut header, &[])
    }

    fn bytes(&mut self, name: &str, data: &[u8], mode: u32) -> Result<(), ImageError> {
        let mut header = tar::Header::new_gnu();
        header.set_mode(mode);
        self.entry(name, &mut header, data)
    }

    fn file(&mut self, from: &Path, name: &str) -> Result<(), ImageError> {
        self.bytes(name, &fs::read(from).map_err(at(from))?, 0o755)
    }

    fn link(&mut self, name: &str, to: &str) -> Result<(), ImageError> {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Symlink);
        header.set_mode(0o777);
        header.set_link_name(to).map_err(at(Path::new(name)))?;
        self.entry(name, &mut header, &[])
    }

    /// A program with all libraries that it is linked to, each where the program looks for it.
    /// With a directory to work in, it is stripped.
    fn program(&mut self, from: &Path, name: &str, strip: Option<&Path>) -> Result<(), ImageError> {
        let data = strip.and_then(|store| stripped(from, store));
        let data = data.map_or_else(|| fs::read(from).map_err(at(from)), Ok)?;
        self.bytes(name.trim_start_matches('/'), &data, 0o755)?;
        for library in libraries(from)? {
            let name = library.to_string_lossy();
            self.file(&library, name.trim_start_matches('/'))?;
        }
        Ok(())
    }
}

/// A program without its debugging information, where the tool for that is installed: a development
/// build is three times the size.
fn stripped(from: &Path, store: &Path) -> Option<Vec<u8>> {
    let strip = find("strip")?;
    let out = tempfile::NamedTempFile::new_in(store).ok()?;
    let mut command = Command::new(strip);
    let done = program::output(command.arg("-o").arg(out.path()).arg(from), PATIENCE).ok()?;
    if done.status.success() { fs::read(out.path()).ok() } else { None }
}

/// The libraries of a program, as the dynamic loader finds them.
fn libraries(of: &Path) -> Result<Vec<PathBuf>, ImageError> {
    let said = program::output(Command::new("ldd").arg(of), PATIENCE);
    let said = said.map_err(at(Path::new("ldd")))?;
    let text = String::from_utf8_lossy(&said.stdout).into_owned();
    let words = text.split_whitespace().filter(|word| word.starts_with('/'));
    Ok(words.map(PathBuf::from).filter(|path| path.is_file()).collect())
}

/// Where a blob lies in the directory of a registry.
#[must_use]
pub(crate) fn blob(store: &Path, digest: &str) -> PathBuf {
    store.join("blobs").join(digest)
}

/// Where the digest that a name stands for is written down.
#[must_use]
pub(crate) fn tag(store: &Path, name: &str, tag: &str) -> PathBuf {
    store.join(format!("{}@{tag}", name.replace('/', "+")))
}

/// What images call the architecture of this machine.
pub(crate) fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

fn put(store: &Path, content: &Value) -> Result<(String, usize), ImageError> {
    let bytes = content.to_string().into_bytes();
    let digest = of_bytes(&bytes);
    let path = blob(store, &digest);
    fs::write(&path, &bytes).map_err(at(&path))?;
    Ok((digest, bytes.len()))
}

fn manifest(store: &Path, name: &str, layers: &[&Written], run: &[&str]) -> Result<(), ImageError> {
    let (config, config_size) = put(
        store,
        &json!({
            "architecture": architecture(),
            "os": "linux",
            "config": { "Entrypoint": run, "Env": ["PATH=/bin:/usr/bin"], "WorkingDir": "/" },
            "rootfs": {
                "type": "layers",
                "diff_ids": layers.iter().map(|l| &l.diff_id).collect::<Vec<_>>(),
            },
        }),
    )?;
    let layers: Vec<Value> = layers
        .iter()
        .map(|layer| {
            json!({
                "mediaType": "application/vnd.oci.image.layer.v1.tar+gzip",
                "digest": layer.digest,
                "size": layer.size,
            })
        })
        .collect();
    let (digest, _) = put(
        store,
        &json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": {
                "mediaType": "application/vnd.oci.image.config.v1+json",
                "digest": config,
                "size": config_size,
            },
            "layers": layers,
        }),
    )?;
    let path = tag(store, name, TAG);
    fs::write(&path, digest).map_err(at(&path))
}

/// Lays the files of an image out in a directory, for a runtime that is called by itself.
///
/// # Errors
/// If a blob cannot be read, or a file cannot be written.
pub(crate) fn unpack(store: &Path, name: &str, into: &Path) -> Result<(), ImageError> {
    let path = tag(store, name, TAG);
    let digest = fs::read_to_string(&path).map_err(at(&path))?;
    let path = blob(store, &digest);
    let manifest: Value = serde_json::from_slice(&fs::read(&path).map_err(at(&path))?)
        .map_err(|e| ImageError::File { path: path.clone(), error: e.into() })?;
    for layer in manifest["layers"].as_array().into_iter().flatten() {
        let path = blob(store, layer["digest"].as_str().unwrap_or_default());
        let file = File::open(&path).map_err(at(&path))?;
        tar::Archive::new(flate2::read::GzDecoder::new(file)).unpack(into).map_err(at(into))?;
    }
    Ok(())
}
