//! Post-copy of a program that touches all of its memory at random as soon as it runs at the destination: how much of the
//! link that gets, and how long its threads wait for a page.

use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, Result, ensure};

use super::Hosts;
use super::world::World;
use crate::bench::{Bench, Goal, median};
use crate::process::Running;
use crate::touches::Touches;

/// Gbit/s of the link, and bytes.
const LINK: u32 = 1;
const BYTES: f64 = 125e6;
const PAGE: f64 = 4096.0;
/// Tenths of a millisecond that a fault may take.
const SOON: usize = 20;

/// One migration.
struct Seen {
    /// The share of the link that pages got.
    share: f64,
    /// The share of faults that were served soon.
    soon: f64,
    /// Milliseconds that 99 of 100 did not take.
    most: f64,
    faults: f64,
}

pub fn measure(bench: &mut Bench) -> Result<()> {
    let all = bench.rounds_in("fetched", |dir| moved(bench, dir))?;
    let middle = |of: fn(&Seen) -> f64| median(&all.iter().map(of).collect::<Vec<_>>());
    let name = |what: &str| format!("post-copy under random faults, {LINK} Gbit/s: {what}");
    let (share, soon) = (Goal::AtLeast(70.0), Goal::AtLeast(99.0));
    bench.add(name("of the link"), middle(|it| it.share) * 100.0, "%", Some(share));
    bench.add(name("faults within 2 ms"), middle(|it| it.soon) * 100.0, "%", Some(soon));
    bench.add(name("99 of 100 faults within"), middle(|it| it.most), "ms", None);
    bench.add(name("faults"), middle(|it| it.faults), "", None);
    Ok(())
}

fn moved(bench: &Bench, dir: &Path) -> Result<Seen> {
    let world = World::new(LINK)?;
    bench.warm_up()?;
    let mut program = world.here.command("setsid");
    program.arg(bench.dir.join("target")).args(["toucher", &bench.mib.to_string()]);
    let (program, said) = Running::heard(program.current_dir(dir).stderr(Stdio::null()))?;
    ensure!(said == "ready", "the program says {said:?}");
    // Its threads are let go by the first byte of their file, when everything is made and nothing runs yet.
    let begin = format!(
        "test $CRTOOLS_SCRIPT_ACTION != pre-resume || \
         printf '\\001' | dd of='{}' conv=notrunc status=none",
        dir.join("touches").display()
    );
    let more = ["--restore-option=--action-script", &format!("--restore-option={begin}")];
    let records = dir.join("records");
    let hosts = Hosts::start(bench.torpor(), dir, &records, &world, &more)?;
    let sample = hosts.migrate(program.pid(), &["--mode", "post-copy"])?;
    let touches = Touches::of(dir)?;
    let rate = touches.rate().context("what has moved")?;
    let waits = touches.waits()?;
    sample.end()?;
    Ok(Seen {
        share: rate * PAGE / BYTES,
        soon: waits.within(SOON),
        most: waits.quantile(0.99),
        faults: waits.all(),
    })
}
