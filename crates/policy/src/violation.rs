//! What images ask for in vain.

use std::fmt;

/// Something that images ask for and the policy does not allow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// The image file.
    pub image: String,
    /// The task, by its pid in the images.
    pub task: Option<u32>,
    /// The rule, by its name in the policy file.
    pub rule: String,
    /// What is asked for, and why it is not allowed.
    pub text: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.image)?;
        if let Some(task) = self.task {
            write!(f, "task {task}: ")?;
        }
        write!(f, "{} ({})", self.text, self.rule)
    }
}
