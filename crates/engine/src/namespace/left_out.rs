//! What of a namespace is not kept, and nobody has to miss.

use crate::error::{Error, Result};

/// Warns that a part of a namespace of task `pid`, with these names, is not kept; nothing if there are none.
///
/// # Errors
/// The refusal, if everything is wanted (`strict`).
pub(super) fn leave_out(pid: i32, object: &str, names: &[String], strict: bool) -> Result<()> {
    let object = format!("{object} ({})", names.join(", "));
    match names {
        [] => Ok(()),
        _ if strict => Err(Error::refused(pid, object, "is not kept")),
        _ => {
            tracing::warn!("task {pid}: {object}: is not kept");
            Ok(())
        }
    }
}
