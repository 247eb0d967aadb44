//! A day of CI after published workloads, for whoever has no trace.

use std::f64::consts::TAU;

use super::Task;
use crate::scheduler::Millis;

const SECOND: f64 = 1000.0;
const HOUR: f64 = 3600.0 * SECOND;
const GIB: f64 = 1_073_741_824.0;

/// Numbers that are the same each time (xorshift).
struct Xorshift(u64);

impl Xorshift {
    /// From 0 to 1.
    #[expect(clippy::cast_precision_loss, reason = "53 bits are kept")]
    fn unit(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Log-normal, with this median.
    fn skewed(&mut self, median: f64, sigma: f64) -> f64 {
        let (a, b) = (self.unit().max(1e-12), self.unit());
        let normal = (-2.0 * a.ln()).sqrt() * (TAU * b).cos();
        median * (sigma * normal).exp()
    }
}

#[expect(clippy::cast_possible_truncation, reason = "durations of days")]
fn millis(time: f64) -> Millis {
    time as Millis
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a few GiB")]
fn bytes(size: f64) -> u64 {
    size as u64
}

/// The day: pushes by the hour (the peak hour 1.55 times the mean), some twelve short jobs an hour that
/// somebody waits for, of log-normal length (median 20 s), and fuzzers, sanitizers and soak tests of hours
/// (median 2) that fill a machine of two slots. Classes are `short` and `long`. The same each time.
#[must_use]
pub fn of_ci() -> Vec<Task> {
    let mut random = Xorshift(0x9e37_79b9_7f4a_7c15);
    let mut tasks = Vec::new();
    let mut now = 0.0;
    while now < 24.0 {
        let load = 1.0 + 0.55 * ((now - 14.0) * TAU / 24.0).cos();
        now += -random.unit().max(1e-12).ln() / (12.0 * load);
        let work = random.skewed(20.0, 1.2).clamp(1.0, 600.0);
        tasks.push(Task {
            at: millis(now * HOUR),
            work: millis(work * SECOND),
            class: "short".to_owned(),
            memory: bytes(GIB / 2.0),
            ..Task::default()
        });
    }
    for push in 0..12_u32 {
        let work = random.skewed(2.0, 0.7).clamp(0.5, 8.0);
        tasks.push(Task {
            at: millis(f64::from(push) * 2.0 * HOUR),
            work: millis(work * HOUR),
            class: "long".to_owned(),
            memory: bytes(random.skewed(0.8, 0.8) * GIB),
            ..Task::default()
        });
    }
    tasks
}
