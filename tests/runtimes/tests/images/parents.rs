//! What images build on: a link in them could lead to the memory of anybody's checkpoint.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use torpor_runtimes_tests::command::{Run, command};
use torpor_runtimes_tests::scratch::Scratch;

use super::{Images, bundle, refuses_of};

/// Has the images, or a copy of them beside them, build on what this leads to.
fn builds_on(dir: &Path, target: impl AsRef<Path>) {
    symlink(target, dir.join("parent")).unwrap();
}

/// The images as they were, which somebody else could have laid out anywhere.
fn others(images: &Images) -> String {
    images.scratch.join("whole").to_str().unwrap().to_owned()
}

/// A copy of the images that lies beside them.
fn beside(images: &Images) -> std::path::PathBuf {
    let copy = images.scratch.join("beside");
    let _ = fs::remove_dir_all(&copy);
    command("cp", &["-a"]).arg(&images.path).arg(&copy).succeed();
    copy
}

#[test]
fn memory_of_others() {
    const ELSEWHERE: &[&str] = &[
        "parent: takes memory out of \"/tmp/",
        "/whole\", which does not lie near the images",
        "(foreign.mounts.sources)",
    ];
    let scratch = Scratch::new("images-parents");
    refuses_of(
        &scratch,
        &bundle(&scratch),
        "",
        &[
            ("by its path", |images| builds_on(&images.path, others(images)), ELSEWHERE),
            (
                "by a way far up",
                |images| builds_on(&images.path, format!("../../..{}", others(images))),
                ELSEWHERE,
            ),
            (
                "by a link on the way",
                |images| {
                    symlink("/", images.path.join("away")).unwrap();
                    builds_on(&images.path, format!("away{}", others(images)));
                },
                ELSEWHERE,
            ),
            (
                "by what lies beside them",
                |images| {
                    let beside = beside(images);
                    builds_on(&beside, others(images));
                    builds_on(&images.path, "../beside");
                },
                ELSEWHERE,
            ),
            (
                "by what lies in a volume",
                |images| {
                    let hop = images.scratch.join("ro/hop");
                    let _ = fs::remove_dir_all(&hop);
                    command("cp", &["-a"]).arg(&images.path).arg(&hop).succeed();
                    builds_on(&hop, others(images));
                    builds_on(&images.path, hop);
                },
                ELSEWHERE,
            ),
        ],
        |images| {
            beside(images);
            builds_on(&images.path, "../beside");
        },
    );
}
