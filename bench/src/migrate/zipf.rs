//! Numbers at random, a few of which come much more often than the others.

/// The exponent that YCSB uses.
const THETA: f64 = 0.99;

/// A generator of numbers (splitmix64).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }

    /// Between 0 and 1.
    #[allow(clippy::cast_precision_loss, reason = "53 bits are exact")]
    fn share(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

fn mix(mut value: u64) -> u64 {
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// The Zipf distribution over `count` numbers, by the method of Gray et al., "Quickly Generating Billion-Record
/// Synthetic Databases" (1994). The frequent numbers are spread over all.
pub struct Zipf {
    count: u64,
    zeta: f64,
    eta: f64,
    alpha: f64,
}

impl Zipf {
    #[allow(clippy::cast_precision_loss, reason = "numbers of records")]
    pub fn new(count: u64) -> Self {
        let count = count.max(2);
        let zeta = |count: u64| (1..=count).map(|i| (i as f64).powf(-THETA)).sum::<f64>();
        let (all, two) = (zeta(count), zeta(2));
        let eta = (1.0 - (2.0 / count as f64).powf(1.0 - THETA)) / (1.0 - two / all);
        Self { count, zeta: all, eta, alpha: 1.0 / (1.0 - THETA) }
    }

    /// The next number below `count`.
    pub fn next(&self, random: &mut Random) -> u64 {
        mix(self.rank(random) + 1) % self.count
    }

    #[allow(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "between 0 and the number of records"
    )]
    fn rank(&self, random: &mut Random) -> u64 {
        let share = random.share();
        let scaled = share * self.zeta;
        if scaled < 1.0 {
            return 0;
        }
        if scaled < 1.0 + 0.5_f64.powf(THETA) {
            return 1;
        }
        let rank = self.count as f64 * (self.eta * share - self.eta + 1.0).powf(self.alpha);
        (rank as u64).min(self.count - 1)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_few_come_often_and_all_are_below_the_end() {
        let (zipf, mut random) = (Zipf::new(1000), Random::new(1));
        let mut counts = vec![0_u32; 1000];
        for _ in 0..100_000 {
            counts[usize::try_from(zipf.rank(&mut random)).unwrap()] += 1;
        }
        // By definition the first has 1 / zeta of all, the second half of that.
        assert!((12_000..15_000).contains(&counts[0]), "{}", counts[0]);
        assert!((6_000..7_500).contains(&counts[1]), "{}", counts[1]);
        assert!(counts[500..].iter().sum::<u32>() > 5_000);
    }
}
