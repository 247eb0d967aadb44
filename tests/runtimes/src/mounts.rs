//! Mounts of this host, as a tree that has a copy of them sees them.

/// For a shell in a mount namespace of its own: takes the mounts away that others change the content of, other tests'
/// among them, which go in all namespaces when whoever made them removes their place, and names of networks, which cannot be
/// made again.
pub const QUIET: &str = "umount --lazy /dev/shm; \
    grep -o ' /run/netns/[^ ]*' /proc/self/mounts | xargs --no-run-if-empty umount --lazy; \
    findmnt --noheadings --raw --output TARGET | grep \"^${TMPDIR:-/tmp}/\" | xargs --no-run-if-empty umount --lazy";
