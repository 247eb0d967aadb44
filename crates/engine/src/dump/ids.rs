//! Numbers for the kernel objects that tasks share.

use std::cmp::Ordering;

use torpor_sys::kcmp::{Object, kcmp};

use crate::error::{Context, Result};

/// Gives the same number to tasks that share an object of one kind. The kernel
/// orders such objects (kcmp(2)), so a new one is found by bisection.
#[derive(Debug)]
pub struct Sharers {
    object: Object,
    /// Task and number, in the kernel's order.
    sorted: Vec<(i32, u32)>,
}

impl Sharers {
    /// Nobody yet.
    pub fn new(object: Object) -> Self {
        Sharers { object, sorted: Vec::new() }
    }

    /// The number of the object of task `pid`, from 1.
    ///
    /// # Errors
    /// The kernel's.
    pub fn number(&mut self, pid: i32) -> Result<u32> {
        let (mut low, mut high) = (0, self.sorted.len());
        while low < high {
            let middle = low.midpoint(high);
            let (other, number) = self.sorted[middle];
            let order = kcmp(pid, other, self.object)
                .context(|| format!("kcmp of tasks {pid} and {other}"))?;
            match order {
                Ordering::Equal => return Ok(number),
                Ordering::Less => high = middle,
                Ordering::Greater => low = middle + 1,
            }
        }
        let number = u32::try_from(self.sorted.len()).unwrap_or(u32::MAX).saturating_add(1);
        self.sorted.insert(low, (pid, number));
        Ok(number)
    }
}
