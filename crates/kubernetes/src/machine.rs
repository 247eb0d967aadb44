//! What a node is to the programs on it: what they may have found there, and count on wherever they go on.

use std::collections::BTreeSet;

use aws_lc_rs::digest::{SHA256, digest};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use torpor_kernel::processor;

/// The label of a node that names its kind of machine, and the annotation that says what that is.
pub(crate) const MACHINE: &str = "torpor.dev/machine";
/// Where agents tell the controllers what their node is.
pub(crate) const MACHINE_PATH: &str = "/v1/machine";
/// No name in one is longer.
const MAX_NAME: usize = 64;
/// None has more instructions.
const MAX_INSTRUCTIONS: usize = 512;

/// A kind of machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Machine {
    /// The architecture, by the kernel's name for it.
    pub architecture: String,
    /// The kernel's version and patch level: `6.12`.
    pub kernel: String,
    /// The instructions that programs may have found, by the kernel's names for them.
    pub instructions: BTreeSet<String>,
}

impl Machine {
    /// This one.
    #[must_use]
    pub(crate) fn this() -> Self {
        let system = rustix::system::uname();
        let release = system.release().to_string_lossy();
        let mut numbers = release.split(|c: char| !c.is_ascii_digit());
        let mut next = || numbers.next().unwrap_or_default().to_owned();
        Self {
            architecture: system.machine().to_string_lossy().into_owned(),
            kernel: format!("{}.{}", next(), next()),
            instructions: processor::instructions(),
        }
    }

    /// The one that an object describes, if it does.
    #[must_use]
    pub(crate) fn read(object: &Value) -> Option<Self> {
        let read: Self = serde_json::from_value(object.clone()).ok()?;
        let is_name = |word: &String| {
            (1..=MAX_NAME).contains(&word.len())
                && word.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
        };
        let is_good = [&read.architecture, &read.kernel].into_iter().all(is_name)
            && read.instructions.iter().all(is_name)
            && read.instructions.len() <= MAX_INSTRUCTIONS;
        is_good.then_some(read)
    }

    /// Its kind, as a label has it: a digest.
    #[must_use]
    pub(crate) fn label(&self) -> String {
        let hash = digest(&SHA256, json!(self).to_string().as_bytes());
        hash.as_ref().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
    }

    /// Whether programs from here go on `there`: nothing is missing, and the kernel is not older.
    #[must_use]
    pub(crate) fn goes_on(&self, there: &Self) -> bool {
        self.architecture == there.architecture
            && self.instructions.is_subset(&there.instructions)
            && self.version() <= there.version()
    }

    fn version(&self) -> Option<(u32, u32)> {
        let (version, patch) = self.kernel.split_once('.')?;
        Some((version.parse().ok()?, patch.parse().ok()?))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A machine with a kernel and instructions.
    pub(crate) fn machine(kernel: &str, instructions: &[&str]) -> Machine {
        let instructions = instructions.iter().map(|word| (*word).to_owned()).collect();
        Machine { architecture: "x86_64".into(), kernel: kernel.into(), instructions }
    }

    #[test]
    fn this_machine_is_one() {
        let this = Machine::this();
        assert!(this.version() >= Some((4, 0)), "{this:?}");
        assert_eq!(Machine::read(&json!(this)), Some(this.clone()));
        assert!(this.goes_on(&this));
        assert!(this.label().len() == 16 && this.label() == this.clone().label());
    }

    #[test]
    fn programs_go_on_where_nothing_is_missing() {
        let here = machine("6.12", &["avx2", "sse2"]);
        for (there, goes_on) in [
            (machine("6.12", &["sse2", "avx2"]), true),
            (machine("6.12", &["sse2", "avx2", "avx512f"]), true),
            (machine("6.18", &["sse2", "avx2"]), true),
            (machine("7.0", &["sse2", "avx2"]), true),
            (machine("6.9", &["sse2", "avx2"]), false),
            (machine("5.15", &["sse2", "avx2"]), false),
            (machine("6.12", &["sse2"]), false),
            (machine("unknown", &["sse2", "avx2"]), false),
            (Machine { architecture: "aarch64".into(), ..here.clone() }, false),
        ] {
            assert_eq!(here.goes_on(&there), goes_on, "{there:?}");
            assert_eq!(here == there, here.label() == there.label(), "{there:?}");
        }
    }

    #[test]
    fn nonsense_is_no_machine() {
        let good = json!(machine("6.12", &["sse2"]));
        assert!(Machine::read(&good).is_some());
        let many: Vec<String> = (0..=MAX_INSTRUCTIONS).map(|number| number.to_string()).collect();
        for (field, wrong) in [
            ("architecture", json!("")),
            ("architecture", json!(7)),
            ("kernel", json!("6.12 and more")),
            ("kernel", Value::Null),
            ("instructions", json!("sse2")),
            ("instructions", json!(["a\nb"])),
            ("instructions", json!(["x".repeat(65)])),
            ("instructions", json!(many)),
        ] {
            let mut bad = good.clone();
            bad[field] = wrong;
            assert_eq!(Machine::read(&bad), None, "{bad}");
        }
        assert_eq!(Machine::read(&Value::Null), None);
    }
}
