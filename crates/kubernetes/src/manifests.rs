//! What is applied to a cluster.

use std::io::{self, Write};

use clap::Args;
use torpor_blobs::reference::Reference;

use crate::controller::RESTORES_PER_NODE;
use crate::error::{Context, Error, Result};

/// All objects but the definitions of ours.
const INSTALL: &str = include_str!("../manifests/install.yaml");
/// The definitions of our objects.
const DEFINITIONS: &str = include_str!("../manifests/definitions.yaml");
/// What stands for the image.
const IMAGE: &str = "IMAGE";
/// What stands for the store.
const STORE: &str = "STORE";
/// What stands for how many pods a node restores at a time.
const RESTORES: &str = "AT_A_TIME";
/// Where a store is mounted that is a directory, and what is mounted then: in the container and in the pod.
const MOUNTS: [(&str, &str); 2] = [
    (
        "            # STORE MOUNT\n",
        "            - name: store\n              mountPath: PATH\n              mountPropagation: HostToContainer\n",
    ),
    (
        "        # STORE VOLUME\n",
        "        - name: store\n          hostPath:\n            path: PATH\n            type: Directory\n",
    ),
];

/// What is printed.
#[derive(Debug, Clone, Args)]
pub struct ManifestsArgs {
    /// The image of the agent and the controller
    #[arg(long, value_name = "IMAGE", default_value = "torpor:latest")]
    pub image: String,
    /// Where checkpoints are stored so that they do not die with their node: dir:PATH, s3://BUCKET/PREFIX or
    /// HOST/NAME (default: nowhere)
    #[arg(long, value_name = "PLACE", default_value = "", hide_default_value = true)]
    pub store: String,
    /// How many pods a node restores at a time
    #[arg(
        long,
        value_name = "NUMBER",
        default_value_t = RESTORES_PER_NODE,
        value_parser = clap::value_parser!(u16).range(1..),
    )]
    pub restores_per_node: u16,
}

/// Everything, as one file.
///
/// # Errors
/// If the image is no name of one, or the store is none.
pub fn manifests(args: &ManifestsArgs) -> Result<String> {
    if !is_image(&args.image) {
        return Err(Error::new(format!(
            "--image {:?} is no name of an image: give [HOST/]NAME[:TAG] or [HOST/]NAME@DIGEST",
            args.image
        )));
    }
    let path = path_of(&args.store)?;
    let mut install = INSTALL.to_owned();
    for (mark, lines) in MOUNTS {
        let lines = path.map(|path| lines.replace("PATH", path)).unwrap_or_default();
        install = install.replace(mark, &lines);
    }
    install = install.replace(RESTORES, &args.restores_per_node.to_string());
    install = install.replace(IMAGE, &args.image).replace(STORE, &args.store);
    Ok(format!("{DEFINITIONS}---\n{install}"))
}

/// Whether a text can name an image: words between slashes, of which the last may have a tag or a digest.
fn is_image(text: &str) -> bool {
    let good = |c: char| c.is_ascii_alphanumeric() || "._-:@".contains(c);
    let is_word = |word: &str| {
        word.starts_with(|c: char| c.is_ascii_alphanumeric())
            && word.ends_with(|c: char| c.is_ascii_alphanumeric())
            && word.chars().all(good)
    };
    text.split('/').all(is_word)
}

/// The directory that a store is, if it is one.
fn path_of(store: &str) -> Result<Option<&str>> {
    let good = |c: char| c.is_ascii_alphanumeric() || "._-/:".contains(c);
    if store.is_empty() {
        return Ok(None);
    }
    if !store.chars().all(good) {
        return Err(Error::new(format!("--store {store:?} has signs that no store has here")));
    }
    if store.parse::<Reference>().is_err() {
        let known = "dir:PATH, s3://BUCKET/PREFIX or HOST/NAME";
        return Err(Error::new(format!("--store {store}: give {known}")));
    }
    match store.strip_prefix("dir:") {
        // It is mounted there on each node.
        Some(path) if !path.starts_with('/') || path.contains(':') => {
            Err(Error::new(format!("--store {store}: give an absolute path without a colon")))
        }
        path => Ok(path),
    }
}

/// Prints it.
///
/// # Errors
/// If the image is no name of one, or nobody reads.
pub fn print(args: &ManifestsArgs) -> Result<()> {
    io::stdout().write_all(manifests(args)?.as_bytes()).context(|| "print")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::{RESTORE_FROM, RUNTIME_CLASS};

    fn printed(image: &str, store: &str) -> Result<String> {
        let restores_per_node = RESTORES_PER_NODE;
        manifests(&ManifestsArgs { image: image.into(), store: store.into(), restores_per_node })
    }

    #[test]
    fn the_image_is_put_in() {
        let all = printed("example.org/torpor:1", "").unwrap();
        assert_eq!(all.matches("image: example.org/torpor:1\n").count(), 2);
        assert!(!all.contains(IMAGE));
        let digest = format!("localhost:5000/a/b@sha256:{}", "0".repeat(64));
        assert!(printed(&digest, "").is_ok());
        for wrong in
            ["", "x\nkind: Pod", "https://example.org/torpor", "a//b", "a/", "a:", "-a", "a b"]
        {
            let why = printed(wrong, "").unwrap_err().to_string();
            assert!(why.contains("--image"), "{why}");
        }
    }

    #[test]
    fn the_store_is_put_in_and_mounted_where_it_is_a_directory() {
        let mounts = |all: &str| all.matches("- name: store\n").count();
        let all = printed("i", "").unwrap();
        assert!(all.contains("\"--store=\"]\n") && !all.contains(STORE) && mounts(&all) == 0);
        let all = printed("i", "s3://bucket/torpor").unwrap();
        assert!(all.contains("\"--store=s3://bucket/torpor\"]\n") && mounts(&all) == 0);
        let all = printed("i", "dir:/mnt/torpor").unwrap();
        assert!(all.contains("\"--store=dir:/mnt/torpor\"]\n") && mounts(&all) == 2);
        assert_eq!(all.matches("ath: /mnt/torpor\n").count(), 2);
        for wrong in ["name", "dir:", "dir:here", "dir:/a:b", "dir:/a\n  - x", "s3://$(NODE_NAME)"]
        {
            assert!(printed("i", wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn it_is_put_in_how_many_pods_a_node_restores_at_a_time() {
        let args = ManifestsArgs { image: "i".into(), store: String::new(), restores_per_node: 17 };
        let all = manifests(&args).unwrap();
        assert!(all.contains(", \"--restores-per-node=17\"]\n") && !all.contains(RESTORES));
    }

    #[test]
    fn columns_show_what_objects_have() {
        let mut shown = Vec::new();
        for definition in DEFINITIONS.split("\n---\n") {
            let (columns, schema) = definition.split_once("openAPIV3Schema:").unwrap();
            let mut names = Vec::new();
            for column in columns.lines().filter_map(|line| line.split_once("jsonPath: ")) {
                let name = column.0.split_once("{ name: ").unwrap().1.split_once(',').unwrap().0;
                names.push(name);
                let path = column.1.trim_end_matches('}').trim().trim_matches('\'');
                if path.starts_with(".metadata.") {
                    continue;
                }
                // Each step is below the one before it.
                let mut below = schema;
                let (head, tail) = path.split_once("[?(").unwrap_or((path, ""));
                let tail = tail.split_once(']').map_or("", |(_, tail)| tail);
                for step in format!("{head}{tail}").split('.').skip(1) {
                    let found = below.split_once(&format!(" {step}:"));
                    below = found.unwrap_or_else(|| panic!("{name}: there is no {step}")).1;
                }
            }
            shown.push(names.join(" "));
        }
        assert_eq!(
            shown,
            [
                "Pod Ready Reason Node Stored Bytes Frozen-ms Claimed-By Age",
                "Start Keeps Age",
                "Pod Phase From To Target Message Age",
            ]
        );
    }

    /// The objects: kind, name, and all of it.
    fn objects(all: &str) -> Vec<(&str, &str, &str)> {
        fn field<'o>(object: &'o str, start: &str) -> &'o str {
            object.lines().find_map(|line| line.strip_prefix(start)).unwrap_or_default()
        }
        let split = |object| (field(object, "kind: "), field(object, "  name: "), object);
        all.split("\n---\n").map(split).collect()
    }

    #[test]
    fn one_apply_is_enough() {
        let all = printed("i", "").unwrap();
        let objects = objects(&all);
        let has = |kind: &str, name: &str| objects.iter().any(|one| (one.0, one.1) == (kind, name));
        assert!(objects.iter().all(|(kind, name, _)| !kind.is_empty() && !name.is_empty()));
        // Definitions, the namespace, what is in it; and nothing that the same apply only defines.
        let first = |is: &dyn Fn(&str) -> bool| objects.iter().position(|one| is(one.2)).unwrap();
        let namespace = first(&|object| object.contains("\nkind: Namespace\n"));
        assert_eq!(first(&|object| object.contains("\nkind: CustomResourceDefinition\n")), 0);
        assert!(namespace < first(&|object| object.contains("\n  namespace: torpor-system\n")));
        for (kind, name, object) in &objects {
            assert!(!object.contains("apiVersion: torpor.dev/"), "{kind} {name}");
            for line in object.lines() {
                if let Some(account) = line.trim().strip_prefix("serviceAccountName: ") {
                    assert!(has("ServiceAccount", account), "{name}: {account}");
                }
            }
            if let Some((_, role)) = object.split_once("\nroleRef:\n") {
                let word = |start: &str| {
                    let mut lines = role.lines().map(str::trim);
                    lines.find_map(|line| line.strip_prefix(start)).unwrap()
                };
                assert!(has(word("kind: "), word("name: ")), "{kind} {name}");
            }
            if *kind == "ValidatingAdmissionPolicy" {
                assert!(has("ValidatingAdmissionPolicyBinding", name), "{name} holds for nobody");
            }
        }
        // Before the webhooks answer they hold up what they are for alone, and nothing here is.
        let hooks = objects.iter().find(|one| one.0 == "MutatingWebhookConfiguration").unwrap().2;
        for hook in hooks.split("\n  - name: ").skip(1) {
            let condition = format!("runtimeClassName == '{RUNTIME_CLASS}'\"");
            assert!(hook.contains(&condition), "{hook}");
        }
        assert!(!all.contains("runtimeClassName: "));
    }

    #[test]
    fn nobody_reads_secrets_of_other_namespaces() {
        for (kind, name, object) in objects(INSTALL) {
            if kind == "ClusterRole" {
                assert!(!object.contains("secrets"), "{name}");
                assert!(!object.contains("\"*\""), "{name}");
            }
        }
    }

    #[test]
    fn names_are_those_of_the_program() {
        use crate::pod::{GATE, LET_GO, RESTORE_REQUEST};
        use crate::{agent, checkpoint, controller, machine, peer};
        let ours = [
            RUNTIME_CLASS,
            RESTORE_FROM,
            RESTORE_REQUEST,
            GATE,
            LET_GO,
            machine::MACHINE,
            peer::AGENT,
        ];
        let of_checkpoints = [checkpoint::NODE_LABEL, checkpoint::GIVES_WAY];
        let audiences =
            [peer::FOR_AGENTS, peer::FOR_CONTROLLERS].map(|a| format!("audience: {a}\n"));
        let audiences = audiences.each_ref().map(String::as_str);
        let names = ours.iter().chain(&of_checkpoints).chain(&audiences);
        for name in names.chain(&[peer::ACCOUNT]).chain(&controller::MAKERS) {
            assert!(INSTALL.contains(name), "{name}");
        }
        for file in [agent::FOR_AGENTS_FILE, agent::FOR_CONTROLLERS_FILE] {
            let (dir, name) = file.rsplit_once('/').unwrap();
            assert!(INSTALL.contains(&format!("mountPath: {dir}\n")), "{dir}");
            assert!(INSTALL.contains(&format!("path: {name}\n")), "{name}");
        }
    }

    #[test]
    fn the_chart_installs_the_same() {
        let chart = concat!(env!("CARGO_MANIFEST_DIR"), "/chart");
        let read = |name: &str| std::fs::read_to_string(format!("{chart}/{name}")).unwrap();
        let mut expected = INSTALL.to_owned();
        for (mark, lines) in MOUNTS {
            let deep = " ".repeat(mark.len() - mark.trim_start().len());
            let lines = lines.replace("PATH", "{{ trimPrefix \"dir:\" .Values.store }}");
            let (when, end) = ("{{- if hasPrefix \"dir:\" .Values.store }}", "{{- end }}");
            expected = expected.replace(mark, &format!("{deep}{when}\n{lines}{deep}{end}\n"));
        }
        let expected = expected.replace(RESTORES, "{{ .Values.restoresPerNode }}");
        let expected = expected.replace(IMAGE, "{{ .Values.image }}");
        let expected = expected.replace(STORE, "{{ .Values.store }}");
        assert_eq!(read("templates/install.yaml"), expected);
        assert_eq!(read("crds/definitions.yaml"), DEFINITIONS);
        let usual = format!("\nrestoresPerNode: {RESTORES_PER_NODE}\n");
        assert!(read("values.yaml").contains(&usual));
    }
}
