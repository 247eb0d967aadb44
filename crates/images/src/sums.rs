//! The sums of files, taken while they are written: whoever wants them afterwards need not read
//! the files again.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use torpor_seal::Sum;
use torpor_seal::manifest::Summing;

/// Sums of the files in a directory, by their names.
#[derive(Debug, Default)]
pub(crate) struct Sums(Mutex<HashMap<String, Sum>>);

impl Sums {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Sum>> {
        // Whoever panicked has left no half of an entry behind.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The sum of a file that is as it was written.
    pub(crate) fn get(&self, name: &str) -> Option<Sum> {
        self.lock().get(name).copied()
    }

    /// Whoever writes to the file now, or removes it, does not say what.
    pub(crate) fn forget(&self, name: &str) {
        self.lock().remove(name);
    }
}

/// Takes the sum of a file.
#[derive(Debug)]
pub(crate) struct Note {
    sums: Arc<Sums>,
    name: String,
    /// Of what was written so far.
    summing: Summing,
}

impl Note {
    pub(crate) fn new(sums: &Arc<Sums>, name: &str) -> Self {
        Self { sums: Arc::clone(sums), name: name.to_owned(), summing: Summing::default() }
    }

    /// Adds what follows in the file.
    pub(crate) fn add(&mut self, bytes: &[u8]) {
        self.summing.add(bytes);
    }

    /// The file is complete. If its sum is known already, nothing was added here.
    pub(crate) fn finish(self, sum: Option<Sum>) {
        let sum = sum.unwrap_or_else(|| self.summing.finish());
        self.sums.lock().insert(self.name, sum);
    }
}
