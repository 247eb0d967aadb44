//! Statistics that assume nothing about the shape of a distribution.

use serde::{Deserialize, Serialize};

/// How many resamples an interval of a median is taken from.
const RESAMPLES: usize = 2000;

/// Samples below this number give no interval.
pub(crate) const FEWEST: usize = 5;

/// What is said about the samples of one row.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// How many samples.
    pub n: usize,
    /// The least.
    pub minimum: f64,
    /// A twentieth lies below.
    pub p5: f64,
    /// A quarter lies below.
    pub p25: f64,
    /// Half lies below.
    pub median: f64,
    /// Three quarters lie below.
    pub p75: f64,
    /// All but a twentieth lies below.
    pub p95: f64,
    /// The greatest.
    pub maximum: f64,
    /// The median distance from the median, scaled to a standard deviation.
    pub mad: f64,
    /// The interval of the median at 95 %: that of the bootstrap, and no narrower than ranks allow.
    pub interval: Option<(f64, f64)>,
    /// How many samples lie more than three quartile distances outside of the quartiles.
    pub outliers: usize,
}

/// The values in ascending order.
#[must_use]
pub fn sorted(values: &[f64]) -> Vec<f64> {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values
}

/// The value below which a share of ascending values lies, between neighbours where it falls there.
#[must_use]
#[allow(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "an index into samples, which are far fewer than 2^52"
)]
fn quantile(ascending: &[f64], share: f64) -> f64 {
    let Some(last) = ascending.len().checked_sub(1) else {
        return f64::NAN;
    };
    let place = share.clamp(0.0, 1.0) * last as f64;
    let below = ascending[place.floor() as usize];
    let above = ascending[place.ceil() as usize];
    below + (above - below) * place.fract()
}

/// The median of values in any order.
#[must_use]
pub fn median(values: &[f64]) -> f64 {
    quantile(&sorted(values), 0.5)
}

/// The median absolute deviation, scaled so that it estimates a standard deviation.
#[must_use]
pub fn deviation(values: &[f64]) -> f64 {
    let centre = median(values);
    let distances: Vec<f64> = values.iter().map(|v| (v - centre).abs()).collect();
    1.4826 * median(&distances)
}

/// Describes samples; nothing if there are none.
#[must_use]
pub fn summary(values: &[f64]) -> Option<Summary> {
    if values.is_empty() {
        return None;
    }
    let ascending = sorted(values);
    let (p25, p75) = (quantile(&ascending, 0.25), quantile(&ascending, 0.75));
    let fence = 3.0 * (p75 - p25);
    let far = |v: &&f64| **v < p25 - fence || **v > p75 + fence;
    Some(Summary {
        n: values.len(),
        minimum: ascending[0],
        p5: quantile(&ascending, 0.05),
        p25,
        median: quantile(&ascending, 0.5),
        p75,
        p95: quantile(&ascending, 0.95),
        maximum: ascending[ascending.len() - 1],
        mad: deviation(values),
        interval: interval(&ascending),
        outliers: ascending.iter().filter(far).count(),
    })
}

/// The 95 % interval of the median of ascending values. Resamples of few values are too much alike: of seven, the
/// bootstrap alone holds the median in 89 of 100 cases. So the interval reaches at least to those values that hold it in
/// 95, whatever the distribution; of five, to the least and the greatest, which do in 94.
fn interval(ascending: &[f64]) -> Option<(f64, f64)> {
    if ascending.len() < FEWEST {
        return None;
    }
    let (low, high) = bootstrap(ascending);
    let rank = rank(ascending.len());
    Some((low.min(ascending[rank]), high.max(ascending[ascending.len() - 1 - rank])))
}

/// How many of `n` values may be left out at either end, so that the median lies between the others in 95 of 100 cases:
/// each value is below it in one case of two, and how many are is as good as normal, with half a value to spare.
#[allow(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a number of samples, which are far fewer than 2^52"
)]
fn rank(n: usize) -> usize {
    let n = n as f64;
    ((n - 1.0 - Z95 * n.sqrt()) / 2.0).max(0.0).floor() as usize
}

/// The 95 % interval of the median, from resamples. The same samples give the same interval.
fn bootstrap(values: &[f64]) -> (f64, f64) {
    let mut random = fastrand::Rng::with_seed(u64::try_from(values.len()).unwrap_or(0));
    let mut medians = Vec::with_capacity(RESAMPLES);
    let mut sample = vec![0.0; values.len()];
    for _ in 0..RESAMPLES {
        sample.fill_with(|| values[random.usize(..values.len())]);
        sample.sort_by(f64::total_cmp);
        medians.push(quantile(&sample, 0.5));
    }
    medians.sort_by(f64::total_cmp);
    (quantile(&medians, 0.025), quantile(&medians, 0.975))
}

/// How much greater one set of samples is than another, as a factor.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Ratio {
    /// The median of all quotients of a sample of the one by a sample of the other.
    pub estimate: f64,
    /// Its interval at 99 %.
    pub low: f64,
    /// Its interval at 99 %.
    pub high: f64,
}

/// The same as a difference, in the unit of the samples: there is one where some are not above zero.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Difference {
    /// The median of all differences of a sample of the one and a sample of the other.
    pub estimate: f64,
    /// Its interval at 99 %.
    pub low: f64,
    /// Its interval at 99 %.
    pub high: f64,
}

/// The two-sided normal quantiles for 95 % and 99 %.
const Z95: f64 = 1.96;
const Z99: f64 = 2.5758;

/// `new` in relation to `old`. Nothing if there are too few samples, or one is not above zero.
#[must_use]
pub fn ratio(old: &[f64], new: &[f64]) -> Option<Ratio> {
    if old.iter().chain(new).any(|&v| v <= 0.0) {
        return None;
    }
    let [estimate, low, high] = paired(old, new, |old, new| new / old)?;
    Some(Ratio { estimate, low, high })
}

/// `new` less `old`. Nothing if there are too few samples.
#[must_use]
pub fn difference(old: &[f64], new: &[f64]) -> Option<Difference> {
    let [estimate, low, high] = paired(old, new, |old, new| new - old)?;
    Some(Difference { estimate, low, high })
}

/// The median of what comes of all pairs of samples, and its interval. The interval is that of the
/// Mann-Whitney test, turned around: it holds at any distribution and at few samples, where resampled
/// medians are too sure of themselves. Nothing if there are too few samples.
#[allow(clippy::cast_precision_loss, reason = "counts of samples are far below 2^52")]
#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a rank among the pairs, checked to be at least zero"
)]
fn paired(old: &[f64], new: &[f64], of: impl Fn(f64, f64) -> f64 + Copy) -> Option<[f64; 3]> {
    if old.len() < FEWEST || new.len() < FEWEST {
        return None;
    }
    let pairs = new.iter().flat_map(|&n| old.iter().map(move |&o| of(o, n)));
    let pairs = sorted(&pairs.collect::<Vec<_>>());
    let (a, b) = (old.len() as f64, new.len() as f64);
    let rank = a * b / 2.0 - Z99 * (a * b * (a + b + 1.0) / 12.0).sqrt();
    let rank = rank.max(0.0).floor() as usize;
    Some([quantile(&pairs, 0.5), pairs[rank], pairs[pairs.len() - 1 - rank]])
}

/// How many samples of each side it takes to find a difference of `share` in 95 of 100 cases, where
/// samples deviate by `deviation` of their median, and less than `threshold` does not count.
#[must_use]
#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "checked to be a small number above zero"
)]
pub(crate) fn runs_for(share: f64, deviation: f64, threshold: f64) -> Option<u32> {
    let effect = (1.0 + share).ln();
    let beyond = effect - (1.0 + threshold).ln();
    if !(beyond > 0.0 && deviation.is_finite()) {
        return None;
    }
    // Both must hold: the interval leaves 1 out, and the estimate is beyond the threshold. The rank
    // test needs 1 / 0.955 of what the test on normal distributions does.
    let interval = 2.0 * ((Z99 + 1.645) * deviation / effect).powi(2) / 0.955;
    let threshold = 2.0 * (1.645 * deviation / beyond).powi(2) / 0.955;
    // Ranks are whole numbers, which costs the interval up to two samples of each side.
    let runs = (interval.max(threshold).ceil() + 2.0).max(8.0);
    (runs < 1e6).then_some(runs as u32)
}

#[cfg(test)]
#[allow(clippy::cast_precision_loss, reason = "counts of samples are far below 2^52")]
mod tests {
    use super::*;

    /// Values around 100 with a given relative deviation, by a fixed seed.
    fn noise(random: &mut fastrand::Rng, n: usize, deviation: f64, factor: f64) -> Vec<f64> {
        let normal = |random: &mut fastrand::Rng| (0..12).map(|_| random.f64()).sum::<f64>() - 6.0;
        (0..n).map(|_| 100.0 * factor * (normal(random) * deviation).exp()).collect()
    }

    #[test]
    fn quantiles_lie_between_neighbours() {
        let values = [1.0, 2.0, 3.0, 4.0];
        assert!((quantile(&values, 0.5) - 2.5).abs() < 1e-12);
        assert!((quantile(&values, 1.0) - 4.0).abs() < 1e-12);
        assert!((median(&[5.0, 1.0, 3.0]) - 3.0).abs() < 1e-12);
        assert!(quantile(&[], 0.5).is_nan());
    }

    /// In 95 of 100 cases at any number of samples, by three deviations of what chance allows. Of five the least and the
    /// greatest do so in 93.75.
    #[test]
    fn the_interval_of_a_median_holds_it() {
        for (n, times, share) in
            [(5, 300, 0.9375), (7, 500, 0.95), (10, 500, 0.95), (15, 200, 0.95), (20, 200, 0.95)]
        {
            let mut random = fastrand::Rng::with_seed(3);
            let held = (0..times)
                .filter(|_| {
                    let (low, high) =
                        summary(&noise(&mut random, n, 0.1, 1.0)).unwrap().interval.unwrap();
                    low <= 100.0 && 100.0 <= high
                })
                .count();
            let times = f64::from(times);
            let least = times * share - 3.0 * (times * share * (1.0 - share)).sqrt();
            assert!(held as f64 >= least, "{held} of {times} with {n} samples");
        }
    }

    /// The share of cases in which the median of `n` values is not between the `rank` + 1st and its like from above.
    fn missed(n: usize, rank: usize) -> f64 {
        let mut ways = 1.0;
        let mut beyond = 0.0;
        for below in 0..=rank {
            beyond += ways;
            ways *= (n - below) as f64 / (below + 1) as f64;
        }
        2.0 * beyond / 2.0_f64.powf(n as f64)
    }

    #[test]
    fn values_are_left_out_where_the_others_hold_the_median() {
        assert_eq!([5, 7, 8, 9, 10, 20].map(rank), [0, 0, 0, 1, 1, 5]);
        for n in 6..200 {
            assert!(missed(n, rank(n)) <= 0.05, "{n}");
            // No more than one more could be.
            assert!(missed(n, rank(n) + 2) > 0.05, "{n}");
        }
    }

    #[test]
    fn outliers_are_counted_and_kept() {
        let mut values = vec![10.0; 20];
        for (i, v) in values.iter_mut().enumerate() {
            *v += f64::from(u32::try_from(i).unwrap()) / 100.0;
        }
        values.push(1000.0);
        let summary = summary(&values).unwrap();
        assert_eq!((summary.n, summary.outliers), (21, 1));
        assert!((summary.maximum - 1000.0).abs() < 1e-9);
    }

    #[test]
    fn equal_sets_seldom_differ() {
        let mut random = fastrand::Rng::with_seed(5);
        let flagged = (0..500)
            .filter(|_| {
                let (a, b) = (noise(&mut random, 10, 0.2, 1.0), noise(&mut random, 10, 0.2, 1.0));
                let ratio = ratio(&a, &b).unwrap();
                ratio.low > 1.0 || ratio.high < 1.0
            })
            .count();
        assert!(flagged <= 15, "{flagged} of 500 at a level of 1 %");
    }

    #[test]
    fn values_below_zero_have_a_difference() {
        let (old, new) = ([-2.0, -1.0, 0.0, 0.0, 1.0], [9.0, 9.0, 9.0, 10.0, 10.0]);
        assert_eq!(ratio(&old, &new), None);
        let difference = difference(&old, &new).unwrap();
        assert!(
            (difference.estimate - 10.0).abs() < 1e-9 && difference.low > 7.0,
            "{difference:?}"
        );
        assert!(super::difference(&old[..4], &new).is_none());
    }

    #[test]
    fn the_forecast_finds_what_it_promises() {
        let mut random = fastrand::Rng::with_seed(7);
        for deviation in [0.03, 0.08] {
            let runs = runs_for(0.10, deviation, 0.05).unwrap();
            let found = (0..300)
                .filter(|_| {
                    let n = usize::try_from(runs).unwrap();
                    let old = noise(&mut random, n, deviation, 1.0);
                    let new = noise(&mut random, n, deviation, 1.1);
                    let ratio = ratio(&old, &new).unwrap();
                    ratio.low > 1.0 && ratio.estimate > 1.05
                })
                .count();
            assert!(found >= 276, "{found} of 300 with {runs} runs at {deviation}");
        }
        assert_eq!(runs_for(0.04, 0.1, 0.05), None);
    }
}
