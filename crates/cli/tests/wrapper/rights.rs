//! A container has the rights that its new pod gives it: images that ask for more are not restored.

use std::fs;

use serde_json::{Value, json};

use super::Node;

/// What a pod gives its container.
type Given = fn(&mut Value);

fn administers(config: &mut Value) {
    for set in ["bounding", "effective", "permitted"] {
        let set = config["process"]["capabilities"][set].as_array_mut().unwrap();
        set.push(json!("CAP_SYS_ADMIN"));
    }
}

/// A profile that refuses these system calls.
fn refuses(config: &mut Value, names: &[&str]) {
    let rule = json!({ "names": names, "action": "SCMP_ACT_ERRNO" });
    config["linux"]["seccomp"] = json!({ "defaultAction": "SCMP_ACT_ALLOW", "syscalls": [rule] });
}

#[test]
fn a_container_gets_no_right_from_its_images() {
    let Some(mut node) = Node::new("a_container_gets_no_right") else { return };
    // What the old pod gave, what the new one gives, and the rule that is broken.
    let cases: [(Given, Given, &str); 2] = [
        (administers, |_| {}, "CAP_SYS_ADMIN (own.capabilities.allow)"),
        (|c| refuses(c, &["keyctl"]), |c| refuses(c, &["keyctl", "bpf"]), "(own.seccomp.more)"),
    ];
    for (number, (more, less, rule)) in cases.into_iter().enumerate() {
        let [old, same, other] = ["old", "same", "other"].map(|name| format!("{name}-{number}"));
        node.bundle(&old);
        node.configure(&old, more);
        let last = node.gives_way(&old);
        for (name, given) in [(&same, more), (&other, less)] {
            node.bundle(name);
            node.configure(name, given);
            node.asked.lock().unwrap().clear();
            assert!(node.create(name).status.success(), "{}", node.log());
            node.good("start", &[name]);
            let (restored, reason) = node.has_told();
            assert_eq!(restored, *name == same, "{name}: {reason}");
            assert!(restored || reason.contains(rule), "{name}: {reason}");
            let least = if restored { last + 1 } else { 1 };
            node.counted(name, least);
            node.good("delete", &["--force", name]);
        }
        fs::remove_dir_all(node.path("checkpoint")).unwrap();
    }
}
