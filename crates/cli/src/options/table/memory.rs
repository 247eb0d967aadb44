//! Options that concern memory.

use std::time::Duration;

use super::{
    BOTH, DUMP, DUMPS, LAZY, Opt, PEERS, PRE_DUMP, RESTORE, SERVER, SERVICE, TREES, flag, optional,
    value,
};
use crate::options::value::{number, parsed, path, string};

/// Seconds for which the working set is recorded.
const WINDOW: u64 = 10;

pub(super) const MEMORY: &[Opt] = &[
    flag(
        "track-mem",
        None,
        DUMPS,
        |s, on| s.engine.memory.track = on,
        "Track memory changes for the next dump",
    ),
    value(
        ("prev-images-dir", None, "DIR"),
        DUMPS | SERVER,
        store!(engine.memory.parent = some path),
        "Images of the dump before this one, relative to the images directory",
    ),
    flag(
        "auto-dedup",
        None,
        TREES | SERVER,
        |s, on| s.engine.memory.auto_dedup = on,
        "Free the space of pages that the new images hold too, or that have been restored",
    ),
    flag(
        "dedup-relatives",
        None,
        DUMP,
        |s, on| s.engine.memory.dedup_relatives = on,
        "Store pages that processes share since they were forked once; only Torpor can restore this",
    ),
    flag(
        "wipe-on-fork",
        None,
        DUMPS,
        |s, on| s.engine.memory.wipe_on_fork = on,
        "Leave out memory that a fork finds empty (MADV_WIPEONFORK): for images that are restored many times",
    ),
    value(
        ("compress", None, "METHOD[:LEVEL]"),
        DUMPS | SERVER,
        store!(engine.memory.compress = some parsed),
        "Compress the memory in the images: lz4 with a level from -64 to 12 (default: -4), or zstd with one from -7 to 19 (default: 1)",
    ),
    value(
        ("threads", None, "N"),
        TREES,
        store!(engine.memory.threads = some number),
        "Copy memory, and seal and open it, with N threads (default: one for each processor)",
    ),
    value(
        ("pre-dump-mode", None, "MODE"),
        PRE_DUMP,
        store!(engine.memory.pre_dump_mode = parsed),
        "How a pre-dump reads memory: splice (default) or read",
    ),
    flag(
        "lazy-pages",
        None,
        BOTH | SERVER,
        |s, on| s.engine.memory.lazy = on,
        "Leave memory for later: a dump or a page server serves it at --port until the restore, \
         which runs already, has all of it",
    ),
    optional(
        ("record-working-set", None, "SECONDS"),
        RESTORE | LAZY,
        |s, v| {
            let seconds = v.map_or(Ok(WINDOW), number)?;
            s.engine.memory.record_working_set = Some(Duration::from_secs(seconds));
            Ok(())
        },
        "With --lazy-pages: for SECONDS (default: 10) bring in only the pages that are touched, and \
         note them beside the images, for later lazy restores to bring them in first",
    ),
    value(
        ("keep-template", None, "FILE"),
        RESTORE,
        store!(keep_template = some path),
        "Restore nothing but memory of the tasks, into one process that is left behind stopped, and name it \
         in FILE: restores with --template FILE are born by it and share that memory",
    ),
    value(
        ("template", None, "FILE"),
        RESTORE,
        store!(engine.memory.template = some path),
        "Have the first task be born by the template that FILE names, if it is one of these images; \
         else it is restored as always",
    ),
    value(
        ("rounds", None, "SOCKET"),
        RESTORE,
        store!(rounds = some path),
        "Build the tasks by images of a dump that let them run on, and complete them with those of \
         later rounds; whoever listens at SOCKET names their directories: \"round DIR\", at the end \
         \"last DIR\"",
    ),
    flag(
        "stream",
        None,
        TREES,
        |s, on| s.engine.stream = on,
        "Exchange images with criu-image-streamer",
    ),
];

pub(super) const PAGES: &[Opt] = &[
    flag(
        "page-server",
        None,
        TREES | LAZY,
        |s, on| s.use_page_server = on,
        "Send pages to a page server; fetch them from a dump or a page server with --lazy-pages",
    ),
    value(
        ("address", None, "ADDRESS"),
        PEERS | SERVICE,
        store!(address = some string),
        "Address of the page server (also unix:PATH), or path of the service's socket",
    ),
    value(
        ("port", None, "PORT"),
        PEERS,
        store!(page_server.port = number),
        "Port of the page server",
    ),
    value(
        ("ps-socket", None, "FD"),
        PEERS,
        store!(ps_socket = some number),
        "Use descriptor FD as the connection to the page server",
    ),
    value(
        ("lazy-socket", None, "FD"),
        LAZY,
        store!(lazy_socket = some number),
        "Take the restore from descriptor FD, which listens at lazy-pages.socket in the work directory",
    ),
    flag(
        "ps-compress",
        None,
        PEERS,
        |s, on| s.page_server.compress = on,
        "Compress pages as long as the other end takes them more slowly, wherever it is",
    ),
    flag(
        "daemon",
        Some('d'),
        SERVER | LAZY | SERVICE,
        |s, on| s.detached = on,
        "Go on in the background once the socket listens",
    ),
    flag("tls", None, PEERS, |s, on| s.tls = on, "Encrypt the connection"),
    value(
        ("tls-cacert", None, "FILE"),
        PEERS,
        store!(tls_files.ca_cert = some path),
        "Trust only this certificate authority",
    ),
    value(
        ("tls-cacrl", None, "FILE"),
        PEERS,
        store!(tls_files.ca_crl = some path),
        "Certificates that are revoked",
    ),
    value(("tls-cert", None, "FILE"), PEERS, store!(tls_files.cert = some path), "Our certificate"),
    value(
        ("tls-key", None, "FILE"),
        PEERS,
        store!(tls_files.key = some path),
        "The key of our certificate",
    ),
    flag(
        "tls-no-cn-verify",
        None,
        PEERS,
        |s, on| s.tls_files.no_cn_verify = on,
        "Do not compare the server's name with its certificate",
    ),
];
