//! A server whose workers share its memory, stored once against once for each.

use anyhow::Result;

use crate::bench::{Bench, Times, Way, median, ratio};

/// The part of the memory that the workers share: they are eight.
const SHARED: u64 = 8;

pub fn measure(bench: &mut Bench) -> Result<()> {
    let mib = bench.mib / SHARED;
    let way = Way { dump: vec!["--dedup-relatives".to_owned()], restore: vec![] };
    let (mut each, mut once) = (Times::default(), Times::default());
    for _ in 0..bench.rounds {
        bench.round("workers", mib, &Way::default(), &mut each)?;
        bench.round("workers", mib, &way, &mut once)?;
    }
    let what = format!("nine processes that share {mib} MiB, stored once");
    let dump = median(&once.dump) / median(&each.dump);
    bench.add(format!("{what}: dump"), dump, "× stored for each", None);
    let restore = median(&once.restore) / median(&each.restore);
    bench.add(format!("{what}: restore"), restore, "× stored for each", None);
    bench.add(format!("{what}: size of the images"), ratio(each.size, once.size), ": 1", None);
    Ok(())
}
