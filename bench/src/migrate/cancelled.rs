//! How soon tasks that are stopped for a migration go on when somebody cancels it.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use super::world::World;
use super::{Hosts, spawn};
use crate::bench::{Bench, Goal, median};
use crate::process::{Running, until};

const ID: &str = "cancelled";

pub fn measure(bench: &mut Bench) -> Result<()> {
    let all = bench.rounds_in("cancelled", |dir| cancelled(bench, dir))?;
    let name = "a migration that is cancelled when its tasks are stopped: they go on after";
    bench.add(name, median(&all), "ms", Some(Goal::AtMost(100.0)));
    Ok(())
}

fn cancelled(bench: &Bench, dir: &Path) -> Result<f64> {
    let world = World::new(0)?;
    bench.warm_up()?;
    let mut program = world.here.command("setsid");
    program.arg(bench.dir.join("target")).args(["writer", &bench.mib.to_string()]);
    let (program, said) = Running::heard(program.current_dir(dir).stderr(Stdio::null()))?;
    ensure!(said == "ready", "the program says {said:?}");
    let counter = dir.join("counter");
    let count = || fs::read(&counter).map(|bytes| bytes[..8].to_owned());
    let records = dir.join("records");
    let hosts = Hosts::start(bench.torpor(), dir, &records, &world, &[])?;
    let reached = dir.join("reached");
    let script = format!(
        "test $TORPOR_STAGE != stopped || {{ touch '{}'; sleep 1000; }}",
        reached.display()
    );
    let words = ["--id", ID, "--mode", "stop-and-copy", "--script", &script];
    let migration = spawn(&mut hosts.command(program.pid(), &words))?;
    until("stopped tasks", || reached.exists())?;
    let before = count()?;
    let start = Instant::now();
    let mut cancel = Command::new(bench.torpor());
    cancel.args(["migrate", "--cancel", ID, "--state-dir"]).arg(records.join("here"));
    let cancel = spawn(&mut cancel)?;
    until("tasks that go on", || count().is_ok_and(|count| count != before))?;
    let millis = start.elapsed().as_secs_f64() * 1e3;
    let output = cancel.wait_with_output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let output = migration.wait_with_output().context("the migration")?;
    ensure!(!output.status.success(), "it has moved");
    Ok(millis)
}
