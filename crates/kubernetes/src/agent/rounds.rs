//! Rounds of the memory of a pod that moves. Each goes to the other node when it is complete, while the pod runs: when it is
//! frozen, only what it has changed since the last one has to follow.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value;
use torpor_queue::http::{Body, Response};

use super::node::Node;
use super::peer;
use super::store::pack_round;
use crate::error::Result;
use crate::message::{LOGS, ROUNDS, round_made, round_sent, rounds_asked};
use crate::pod::text;

/// How long whoever asks for a round waits until it is complete.
const LOOKS: Duration = Duration::from_secs(5);
/// How often it is looked whether it is.
const STEP: Duration = Duration::from_millis(50);
/// Of no more checkpoints is it known what is here.
const MOST: usize = 10_000;

/// How many rounds are here of a checkpoint that is on its way; nothing when the rest is being fetched. Whoever brings more
/// holds the number.
pub(super) type Count = Arc<Mutex<Option<u32>>>;

/// What is here of each checkpoint that is on its way, by uid.
#[derive(Debug, Default)]
pub(super) struct RoundsHere(Mutex<HashMap<String, Count>>);

impl RoundsHere {
    /// How many of a checkpoint are.
    pub(super) fn of(&self, object: &Value) -> Count {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Of what does not come nobody tells. Two who bring the same checkpoint have to share its number.
        if all.len() >= MOST {
            all.retain(|_, count| Arc::strong_count(count) > 1);
        }
        let first = || Arc::new(Mutex::new(Some(0)));
        Arc::clone(all.entry(text(object, "/metadata/uid").to_owned()).or_insert_with(first))
    }

    /// It is here, or does not come.
    pub(super) fn forget(&self, object: &Value) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.remove(text(object, "/metadata/uid"));
    }
}

impl Node {
    /// Fetches the next round of a checkpoint that is being made for `pod`, if there is one. What does not come now comes
    /// with the rest, and so does what the other node has not begun to hand out by `until`.
    ///
    /// # Errors
    /// If the node that makes it does not answer, or refuses; if there is no place for it.
    pub(super) fn next_round(&self, object: &Value, pod: &str, until: Instant) -> Result<()> {
        let (namespace, name) =
            (text(object, "/metadata/namespace"), text(object, "/metadata/name"));
        if text(object, "/status/checkpointLocation/peer/address").is_empty() {
            return Ok(());
        }
        let here = self.rounds.of(object);
        let mut count = here.lock().unwrap_or_else(PoisonError::into_inner);
        // Whoever fetches the rest has the directory for itself, and may have made another one since.
        let Some(had) = *count else { return Ok(()) };
        if had >= ROUNDS || self.store.find(namespace, name).is_some() {
            return Ok(());
        }
        self.be_introduced()?;
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        let silence = left.min(self.silence());
        let dir = match had {
            0 => self.store.begin(namespace, name)?,
            _ => self.store.part(namespace, name)?,
        };
        let fetched =
            self.of_peer(|caller| peer::fetch_round(caller, object, pod, had + 1, &dir, silence));
        *count = Some(had + u32::from(fetched?));
        Ok(())
    }

    /// Hands out a round of a checkpoint that is being made here, when it is complete.
    pub(super) fn hand_out(&self, namespace: &str, name: &str, round: u32) -> Response {
        let none = || Response::problem(404, "there is no such round");
        let Ok(dir) = self.store.part(namespace, name) else { return none() };
        // Whoever makes it waits only for somebody who asks. Nothing is made where nothing is being made.
        let _ = fs::create_dir(dir.join(LOGS));
        let _ = fs::write(rounds_asked(&dir), "");
        if !is_made(&dir, round) {
            return none();
        }
        let body = Body::Stream(Box::new(move |to| {
            pack_round(&dir, round, to)?;
            // Whoever makes it and does not hear of this waits for the end of its time.
            let _ = fs::write(round_sent(&dir, round), "");
            Ok(())
        }));
        Response::new("application/x-tar", body)
    }
}

/// Waits until a round is complete, or will not be.
fn is_made(dir: &Path, round: u32) -> bool {
    let until = Instant::now() + LOOKS;
    loop {
        if round_made(dir, round).exists() {
            return true;
        }
        // When the pod is frozen, the rest comes at once.
        let is_over = !dir.is_dir() || dir.join("containers").exists();
        if is_over || Instant::now() >= until {
            return false;
        }
        sleep(STEP);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_somebody_brings_is_not_forgotten_for_others() {
        let rounds = RoundsHere::default();
        let object = |uid: String| json!({ "metadata": { "uid": uid } });
        let brought = object("brought".to_owned());
        let count = rounds.of(&brought);
        for number in 0..=MOST {
            drop(rounds.of(&object(number.to_string())));
        }
        assert!(Arc::ptr_eq(&count, &rounds.of(&brought)));
        assert!(rounds.0.lock().unwrap().len() <= MOST);
    }
}
