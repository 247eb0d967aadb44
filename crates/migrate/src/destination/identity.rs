//! Which agent this is: the number that its records are known by. Who asks another one, or one that has lost them, gets no
//! answer that means something.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use crate::error::{Context, Error, Result};
use crate::record::{check_id, new_id, write_synced};

/// The file with the number, beside the records.
const NAME: &str = "agent";

/// The number of the agent whose records are in `dir`; a new one, if they have none.
///
/// # Errors
/// If it cannot be read or written.
pub(super) fn of(dir: &Path) -> Result<String> {
    let path = dir.join(NAME);
    match fs::read_to_string(&path) {
        Ok(id) if check_id(&id).is_ok() => Ok(id),
        Ok(_) => Err(Error::refused_with(
            format!("{} does not hold the number of an agent", path.display()),
            "remove it, if no source waits for the answer of this agent",
        )),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let id = new_id()?;
            write_synced(&path, id.as_bytes())?;
            Ok(id)
        }
        Err(error) => Err(error).context(|| path.display().to_string()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn an_agent_is_known_by_its_records() {
        let [one, other] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let id = of(one.path()).unwrap();
        assert_eq!(of(one.path()).unwrap(), id);
        assert_ne!(of(other.path()).unwrap(), id);
        fs::write(one.path().join(NAME), "").unwrap();
        assert!(of(one.path()).unwrap_err().to_string().contains("the number of an agent"));
    }
}
