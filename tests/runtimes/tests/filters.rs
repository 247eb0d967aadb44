//! Images whose seccomp filters let more through than the profile of the configuration.

use serde_json::json;
use torpor_images::kind;
use torpor_images::proto::SeccompEntry;

use torpor_runtimes_tests::scratch::Scratch;

use crate::images::{Images, PROGRAM, Row, bundle_of, refuses_of};

#[test]
fn filters_beyond_the_profile() {
    const ALLOW: [u8; 8] = instruction(0x06, 0, 0x7fff_0000);
    /// An instruction of a filter, and how many it leaves out if it is a test that fails.
    const fn instruction(code: u8, otherwise: u8, k: u32) -> [u8; 8] {
        let [k0, k1, k2, k3] = k.to_le_bytes();
        [code, 0, 0, otherwise, k0, k1, k2, k3]
    }
    fn filters(images: &Images, change: impl Fn(&mut Vec<u8>)) {
        let mut entry: SeccompEntry = images.dir.read_one(kind::SECCOMP, 0).unwrap();
        entry.seccomp_filters.iter_mut().for_each(|of| change(&mut of.filter));
        images.dir.write_one(kind::SECCOMP, 0, &entry).unwrap();
    }
    /// Lets through for what the word at `offset` of what filters see is `value`.
    fn if_word(images: &Images, offset: u32, value: u32) {
        filters(images, |program| {
            let test = [instruction(0x20, 0, offset), instruction(0x15, 1, value), ALLOW];
            *program = [test.concat(), std::mem::take(program)].concat();
        });
    }
    const WANTED: &str =
        "the profile that the calling runtime gives does not (foreign.seccomp.more)";
    const BOTH: &str = "that lets through keyctl, fadvise64 (SCMP_ARCH_X86): ";
    let scratch = Scratch::new("images-profile");
    let bundle = bundle_of(&scratch, PROGRAM).configure(|config| {
        let denied = json!({"names": ["keyctl", "bpf"], "action": "SCMP_ACT_ERRNO"});
        config["linux"]["seccomp"] =
            json!({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [denied]});
    });
    let rows: &[Row] = &[
        (
            "everything",
            |images| filters(images, |program| *program = ALLOW.to_vec()),
            &["core-1.img: task 1: a seccomp filter that lets through keyctl, bpf, ", WANTED],
        ),
        ("one number, by each convention", |images| if_word(images, 0, 250), &[BOTH, WANTED]),
        (
            "the calls of another convention",
            |images| if_word(images, 4, 0x4000_0003),
            &["restart_syscall (SCMP_ARCH_X86), ", WANTED],
        ),
        (
            "a call, by an argument",
            |images| {
                if_word(images, 16, 7);
                if_word(images, 24, 7);
            },
            &["that lets through keyctl, bpf, ", WANTED],
        ),
    ];
    refuses_of(&scratch, &bundle, "", rows, |_| {});
}
