//! What a restore costs that fails, without Kubernetes. Nothing here is a condition: the figures are in
//! docs/kubernetes.md.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use torpor_seal::keys::AgeIdentity;

use super::Node;

/// How many containers are created in each way.
const STARTS: u32 = 10;

/// Changes the pages of a container in a checkpoint, which are looked at last.
fn damage(images: &Path) {
    let file = images.join("pages-1.img");
    let mut bytes = fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&file, bytes).unwrap();
}

#[test]
fn what_a_failed_restore_costs() {
    if std::env::var("TORPOR_LONG").is_err() {
        eprintln!(
            "what_a_failed_restore_costs: skipped, since it only measures: set TORPOR_LONG=1"
        );
        return;
    }
    let Some(mut node) = Node::new("what_a_failed_restore_costs") else { return };
    let (identity, key) = AgeIdentity::generate().unwrap();
    *node.key.lock().unwrap() = Some((identity.recipient().to_string(), key.to_string()));
    node.saved("old");
    let (checkpoint, aside) = (node.path("checkpoint"), node.path("aside"));
    let images = checkpoint.join("containers/main");
    let mut each = |what: &str, restored: Option<bool>| {
        let mut spent = Duration::ZERO;
        for number in 0..STARTS {
            let name = format!("{}-{number}", what.replace([' ', ','], "-"));
            node.bundle(&name);
            node.asked.lock().unwrap().clear();
            let began = Instant::now();
            let created = node.create(&name);
            spent += began.elapsed();
            assert!(created.status.success(), "{}", node.log());
            node.good("start", &[&name]);
            if let Some(restored) = restored {
                assert_eq!(node.has_told().0, restored, "{:?}", node.told());
            }
            node.good("delete", &["--force", &name]);
        }
        eprintln!("a container is created {what}: {} ms", (spent / STARTS).as_millis());
    };
    each("from a checkpoint", Some(true));
    fs::rename(&checkpoint, &aside).unwrap();
    each("cold", None);
    fs::rename(&aside, &checkpoint).unwrap();
    let core = images.join("core-1.img");
    let whole = fs::read(&core).unwrap();
    fs::write(&core, "forged").unwrap();
    each("cold, from an image that was found to be forged", Some(false));
    fs::write(&core, whole).unwrap();
    damage(&images);
    each("cold, from pages that were found to be changed", Some(false));
}
