//! A container whose memory limit is less than what it has in memory.

use serde_json::json;

use crate::fixture::{Fixture, shown};

#[test]
fn a_start_that_the_memory_limit_ends_says_so() {
    let fixture = Fixture::new("limit", 20_000);
    let reference = fixture.reference();
    fixture.create(&reference, &["--no-trial"]);
    fixture.configure(|config| {
        config["linux"]["resources"]["memory"] = json!({ "limit": 30_000_000 });
    });
    let run = fixture.try_run(&reference, "one", &["--policy", "Always", "--prefetch", "all"]);
    assert!(!run.status.success(), "{}", shown(&run));
    let said = shown(&run);
    assert!(said.contains("killed by the memory limit of the container (30 MB)"), "{said}");
    assert!(said.contains("raise linux.resources.memory.limit"), "{said}");
}
