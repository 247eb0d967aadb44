//! CRIU's image format.

/// The messages of the image files and of the RPC.
#[allow(missing_docs, clippy::all)]
pub mod proto {
    include!(concat!(env!("OUT_DIR"), "/criu.rs"));
}
