//! What a snapshot needs of its host, as `inspect` and `lint` say it.

use std::fs;

use serde_json::{Value, json};

use crate::fixture::{Fixture, shown};
use crate::sealed::key;

/// A fixture whose application has a file of the host open.
fn with_data(name: &str) -> Fixture {
    let fixture = Fixture::new(name, 10);
    fs::create_dir(fixture.path("data")).unwrap();
    let opens = "exec 5>>/data/log; echo >/opened; while :; do busybox sleep 1000 & wait; done";
    fixture.configure(|config| {
        config["process"]["args"] = json!(["/bin/sh", "-c", opens]);
        config["mounts"].as_array_mut().unwrap().push(json!({
            "destination": "/data", "type": "none", "source": fixture.path("data"), "options": ["rbind"],
        }));
    });
    fixture
}

#[test]
fn inspect_says_what_it_needs_of_a_host() {
    let fixture = with_data("needs");
    let reference = fixture.reference();
    let made = fixture.try_create(&reference, &["--ready", "exec:test -e /opened"]);
    assert!(made.status.success(), "{}", shown(&made));
    let inspect = |more: &[&str]| {
        let output = fixture.torpor(&[&["inspect", &reference], more].concat()).output().unwrap();
        assert!(output.status.success(), "{}", shown(&output));
        String::from_utf8(output.stdout).unwrap()
    };
    let data = fixture.path("data").display().to_string();
    let said = inspect(&[]);
    let has = "sets of instructions, all of which this machine has";
    assert!(
        said.contains(has) && said.contains(&format!("{data} of the host, at /data")),
        "{said}"
    );
    let facts: Value = serde_json::from_str(&inspect(&["--json"])).unwrap();
    assert_eq!(facts["mounts"], json!([{"destination": "/data", "source": data}]));
    assert_eq!((&facts["lacks"], &facts["cosign"]), (&json!([]), &json!([])));
    fixture.describe(|about| {
        about["machine"]["instructions"].as_array_mut().unwrap().push("avx9999".into());
    });
    assert!(inspect(&[]).contains("of which this machine lacks avx9999"));
    let facts: Value = serde_json::from_str(&inspect(&["--json"])).unwrap();
    assert_eq!(facts["lacks"], json!(["avx9999"]));
    // One of an earlier version does not say it.
    fixture.describe(|about| {
        about["machine"].as_object_mut().unwrap().remove("instructions");
    });
    assert!(!inspect(&[]).contains("sets of instructions"));
}

/// Files that are open, where the container is not alone, have to be as they were.
#[test]
fn lint_names_open_files_of_the_host() {
    let fixture = with_data("open-files");
    let (key, recipient) = key(&fixture);
    let reference = fixture.reference();
    let data = fixture.path("data").display().to_string();
    let sealed = (vec!["--recipient", recipient.as_str()], vec!["--identity", key.as_str()]);
    for (create, lint) in [(vec![], vec![]), sealed] {
        let ready = ["--ready", "exec:test -e /opened"];
        let made = fixture.try_create(&reference, &[&ready[..], &create].concat());
        assert!(made.status.success(), "{}", shown(&made));
        let found = fixture.torpor(&[&["lint", &reference][..], &lint].concat()).output().unwrap();
        assert_eq!(found.status.code(), Some(2), "{}", shown(&found));
        let said = String::from_utf8(found.stdout).unwrap();
        let mounted = format!("outside: /data is {data} of the host");
        let open = format!("outside: /data/log is open to be written, in {data} of the host");
        assert_eq!(said.lines().collect::<Vec<_>>(), [mounted, open]);
    }
}
