//! What a start from a snapshot takes whatever the size: to the first instruction, of many containers at once, of a root
//! with many files; and how soon a cold start begins where there is none from the snapshot.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use torpor_blobs::oci::sha256;

use crate::bench::{Bench, Goal, median, run};
use crate::place::{Place, born, memory, number};
use crate::process::Running;
use crate::registry::Registry;

/// MiB of an application that is small.
const SMALL: u64 = 50;
/// MiB of the one that there are many of, and how many.
const LARGE: u64 = 500;
const MANY: u64 = 100;
/// Bytes.
const MIB: f64 = 1024.0 * 1024.0;
/// Directories of a root with many files, and files in each.
const FILES: (usize, usize) = (300, 100);
/// The application says that it is ready.
const READY: [&str; 2] = ["--ready", "log:ready"];

pub fn measure(bench: &mut Bench) -> Result<()> {
    let dir = bench.dir.join("starts");
    fs::create_dir(&dir)?;
    let registry = Registry::start(&dir)?;
    for mib in [SMALL, bench.mib] {
        of_size(bench, &registry, &dir, mib).with_context(|| format!("{mib} MiB"))?;
    }
    of_many_files(bench, &registry, &dir).context("many files")?;
    many(bench, &registry, &dir).context("many containers")?;
    cold(bench, &registry, &dir).context("cold starts")?;
    drop(registry);
    Ok(fs::remove_dir_all(dir)?)
}

/// A place whose container has so much memory.
fn place<'r>(
    bench: &Bench,
    registry: &'r Registry,
    dir: &Path,
    name: &str,
    mib: u64,
) -> Result<Place<'r>> {
    let words = ["/target", "small-pages", &mib.to_string()];
    let place = Place::make(bench, registry, dir, name, &words)?;
    fs::copy(bench.dir.join("target"), place.root().join("target"))?;
    Ok(place)
}

/// Milliseconds to the first instruction of a container, which is there until it is deleted.
fn instruction(place: &Place<'_>, reference: &str, name: &str) -> Result<f64> {
    number(&place.run(reference, name, &["--policy", "Always"])?, "first_instruction_ms")
}

/// Starts of one size, from everywhere.
fn of_size(bench: &mut Bench, registry: &Registry, dir: &Path, mib: u64) -> Result<()> {
    let place = place(bench, registry, dir, &format!("mib-{mib}"), mib)?;
    let (far, near) = (place.in_registry("1"), place.in_directory());
    place.create(&far, &READY)?;
    place.create(&near, &READY)?;
    let (mut alone, mut times) = (vec![], [const { Vec::new() }; 4]);
    for _ in 0..bench.rounds {
        bench.warm_up()?;
        alone.push(by_itself(&place)?);
        let ways = [(&far, false), (&far, true), (&near, false)];
        for (times, (reference, is_cached)) in times.iter_mut().zip(ways) {
            if !is_cached {
                place.forget()?;
            }
            times.push(instruction(&place, reference, "one")?);
            place.settle("one")?;
        }
        run(&mut place.snapshot(&["keep", &far]))?;
        times[3].push(instruction(&place, &far, "one")?);
        place.delete("one")?;
        run(&mut place.snapshot(&["keep", &far, "--release"]))?;
    }
    let most = born(u32::try_from(mib).map(f64::from)? * MIB);
    let what = "runc run of the same bundle, by itself";
    bench.add(format!("{mib} MiB: {what}"), median(&alone), "ms", None);
    let froms = [
        ("a registry", Some(100.0)),
        ("the cache", None),
        ("a directory", None),
        ("a template", Some(most)),
    ];
    for ((from, most), times) in froms.into_iter().zip(&times) {
        let what = format!("{mib} MiB: first instruction from {from}");
        bench.add(what, median(times), "ms", most.map(Goal::AtMost));
    }
    Ok(fs::remove_dir_all(&place.dir)?)
}

/// Milliseconds that runc takes for a container of the same bundle, with nothing of ours.
fn by_itself(place: &Place<'_>) -> Result<f64> {
    let id = format!("torpor-bench-{}-alone", std::process::id());
    let begin = Instant::now();
    let mut runc = Command::new("runc");
    runc.args(["run", "--detach", "--bundle"]).arg(place.bundle()).arg(&id);
    Running::start(&mut runc)?.end()?;
    let time = begin.elapsed().as_secs_f64() * 1e3;
    run(Command::new("runc").args(["delete", "--force", &id]))?;
    Ok(time)
}

/// The root is looked through at each start, whether it is what the snapshot was made of.
fn of_many_files(bench: &mut Bench, registry: &Registry, dir: &Path) -> Result<()> {
    let place = place(bench, registry, dir, "files", SMALL)?;
    let (dirs, files) = FILES;
    for number in 0..dirs {
        let dir = place.root().join("srv").join(number.to_string());
        fs::create_dir_all(&dir)?;
        (0..files).try_for_each(|number| fs::write(dir.join(number.to_string()), "text"))?;
    }
    let reference = place.in_registry("1");
    place.create(&reference, &READY)?;
    let (mut cached, mut kept) = (vec![], vec![]);
    for _ in 0..bench.rounds {
        // The first one fills the cache.
        for times in [&mut vec![], &mut cached] {
            times.push(instruction(&place, &reference, "one")?);
            place.settle("one")?;
        }
        run(&mut place.snapshot(&["keep", &reference]))?;
        kept.push(instruction(&place, &reference, "one")?);
        place.delete("one")?;
        run(&mut place.snapshot(&["keep", &reference, "--release"]))?;
    }
    for (from, times) in [("the cache", &cached), ("a template", &kept)] {
        let what = format!("a root of {} files: first instruction from {from}", dirs * files);
        bench.add(what, median(times), "ms", None);
    }
    Ok(fs::remove_dir_all(&place.dir)?)
}

/// A hundred containers of one template: their memory, beside that of one, and their starts.
fn many(bench: &mut Bench, registry: &Registry, dir: &Path) -> Result<()> {
    let place = place(bench, registry, dir, "many", LARGE)?;
    let reference = place.in_directory();
    place.create(&reference, &[&READY[..], &["--no-trial"]].concat())?;
    let pid = |said: &Value| -> Result<u32> {
        Ok(u32::try_from(said["pid"].as_u64().context("no pid")?)?)
    };
    let one = place.run(&reference, "one", &["--policy", "Always", "--prefetch", "all"])?;
    let alone = memory(pid(&one)?, "smaps_rollup", "Rss:")?;
    place.delete("one")?;
    let more = ["--policy", "Always", "--count", &MANY.to_string()];
    let all = place.run_all(&reference, "many", &more)?;
    ensure!(all.iter().all(|said| said["template"] == true), "they have memory of their own");
    let (mut together, mut own, mut times) = (0.0, vec![], vec![]);
    for said in &all {
        let (pid, tables) = (pid(said)?, memory(pid(said)?, "status", "VmPTE:")?);
        together += memory(pid, "smaps_rollup", "Pss:")?;
        own.push((memory(pid, "smaps_rollup", "Private_Dirty:")? + tables) / MIB);
        times.push(number(said, "first_instruction_ms")?);
    }
    (1..=MANY).try_for_each(|number| place.delete(&format!("many-{number}")))?;
    let what = format!("{MANY} containers of {LARGE} MiB: their memory, but for the tables");
    bench.add(what, together / alone, "× one", Some(Goal::AtMost(1.3)));
    let what =
        format!("{MANY} containers of {LARGE} MiB: what one does not share, tables included");
    bench.add(what, median(&own), "MiB", Some(Goal::AtMost(2.0)));
    let what = format!("{MANY} containers of {LARGE} MiB: first instruction of each");
    let most = born(u32::try_from(LARGE).map(f64::from)? * MIB);
    bench.add(what, median(&times), "ms", Some(Goal::AtMost(most)));
    Ok(fs::remove_dir_all(&place.dir)?)
}

/// How soon a cold start begins when it is known that there is none from the snapshot.
fn cold(bench: &mut Bench, registry: &Registry, dir: &Path) -> Result<()> {
    let place = place(bench, registry, dir, "cold", SMALL)?;
    let (far, near) = (place.in_registry("1"), place.in_directory());
    place.create(&far, &READY)?;
    place.create(&near, &READY)?;
    let from = format!("runc:{}", place.bundle().display());
    // Nobody listens there.
    let down = far.replace(":5000/", ":5001/");
    let unanswered = ["--ready", "exec:test ! -e /run/torpor/restored", "--timeout", "5"];
    let mut after = |what: &str, why: &str, reference: &str, more: &[&str]| -> Result<()> {
        let mut times = vec![];
        for _ in 0..bench.rounds {
            let said = place.run(reference, "one", more)?;
            let is_that = said["reason"].as_str().is_some_and(|reason| reason.contains(why));
            ensure!(said["started_from"] == "cold" && is_that, "{what}: {said}");
            times.push(number(&said, "fallback_ms")?);
            place.delete("one")?;
        }
        let what = format!("until the cold start begins after {what}");
        bench.add(what, median(&times), "ms", Some(Goal::AtMost(200.0)));
        Ok(())
    };
    after("a registry that is down", "refused", &down, &["--from", &from])?;
    after("a container that does not answer", "not ready", &far, &unanswered)?;
    let trusted = sign(&place, &near)?;
    after(
        "an expired signature",
        "has expired at",
        &near,
        &["--trust", &trusted, "--require-signature"],
    )?;
    let disk = FullDisk::mount(&place)?;
    after("a full disk", "No space left", &near, &["--from", &from])?;
    drop(disk);
    damage(&place.store())?;
    after("a damaged chunk", "is damaged at", &near, &["--prefetch", "all"])?;
    alienate(&place.store())?;
    after("another processor", "another processor", &near, &["--from", &from])?;
    place.configure(|config| config["process"]["env"] = json!(["CHANGED=1"]))?;
    after("another configuration", "another configuration", &far, &[])?;
    Ok(fs::remove_dir_all(&place.dir)?)
}

/// Signs a snapshot, for as long as nothing. Returns the file with the certificate of whoever is to be trusted.
fn sign(place: &Place<'_>, reference: &str) -> Result<String> {
    let file = |name: &str| place.dir.join(name).display().to_string();
    let script = "new='req -x509 -newkey ed25519 -noenc'
        openssl $new -subj /CN=bench -keyout ca.key -out ca.crt
        openssl $new -subj /CN=maker -keyout key -out certificate -CA ca.crt -CAkey ca.key \\
            -addext basicConstraints=critical,CA:FALSE -addext keyUsage=critical,digitalSignature";
    run(Command::new("sh").args(["-ec", script]).current_dir(&place.dir))?;
    let (key, certificate) = (file("key"), file("certificate"));
    let by = ["--sign-key", &key, "--sign-cert", &certificate, "--expires", "0"];
    run(&mut place.snapshot(&[&["sign", reference][..], &by].concat()))?;
    Ok(file("ca.crt"))
}

/// A disk for what belongs to containers that has no room for a snapshot.
struct FullDisk(PathBuf);

impl FullDisk {
    fn mount(place: &Place<'_>) -> Result<Self> {
        let dir = place.dir.join("state");
        run(Command::new("mount").args(["-t", "tmpfs", "-o", "size=1m", "tmpfs"]).arg(&dir))?;
        Ok(Self(dir))
    }
}

impl Drop for FullDisk {
    fn drop(&mut self) {
        let _ = run(Command::new("umount").arg("--lazy").arg(&self.0));
    }
}

/// Has the snapshot in a directory say that it is for another processor.
fn alienate(store: &Path) -> Result<()> {
    let here = if cfg!(target_arch = "x86_64") { ("amd64", "arm64") } else { ("arm64", "amd64") };
    let file = |digest: &str| store.join("blobs").join(digest.replace(':', "/"));
    // A blob with one word in place of another, which is as long: descriptors have its size. Returns the new digest.
    let change = |digest: &str, (from, to): (&str, &str)| -> Result<String> {
        let changed = fs::read_to_string(file(digest))?.replace(from, to);
        let new = sha256(changed.as_bytes());
        fs::write(file(&new), changed)?;
        Ok(new)
    };
    let index = store.join("index.json");
    let text = fs::read_to_string(&index)?;
    let all: Value = serde_json::from_str(&text)?;
    let named =
        |entry: &&Value| entry["annotations"]["org.opencontainers.image.ref.name"] == "latest";
    let entry = all["manifests"].as_array().and_then(|all| all.iter().find(named));
    let old = entry.and_then(|entry| entry["digest"].as_str()).context("no snapshot")?;
    let manifest: Value = serde_json::from_slice(&fs::read(file(old))?)?;
    let config = manifest["config"]["digest"].as_str().context("no configuration")?;
    let new = change(old, (config, &change(config, here)?))?;
    Ok(fs::write(index, text.replace(old, &new))?)
}

/// Changes a byte of the largest blob in a directory.
fn damage(store: &Path) -> Result<()> {
    let mut blobs = vec![];
    for entry in fs::read_dir(store.join("blobs/sha256"))? {
        let entry = entry?;
        blobs.push((entry.metadata()?.len(), entry.path()));
    }
    let (size, path) = blobs.into_iter().max().context("there are no blobs")?;
    let file = fs::File::options().read(true).write(true).open(path)?;
    let mut byte = [0];
    file.read_exact_at(&mut byte, size / 2)?;
    Ok(file.write_all_at(&[!byte[0]], size / 2)?)
}
