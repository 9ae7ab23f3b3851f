// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Computes medians and percentiles.

/// Returns the middle value, or the mean of the two middle ones; sorts `values`. Returns `None` if there are none.
pub fn median(values: &mut [f64]) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let half = values.len() / 2;
    match values.len() {
        0 => None,
        n if n % 2 == 1 => Some(values[half]),
        _ => Some((values[half - 1] + values[half]) / 2.0),
    }
}

/// Returns the smallest value that is not below `percent` per cent of `sorted` (nearest rank), or `None` if there are
/// none.
pub fn percentile(sorted: &[f64], percent: f64) -> Option<f64> {
    // Slightly less: 99.9 % of 1000 is 999, and not the little more that floating point makes of it.
    let rank = (percent / 100.0 * sorted.len() as f64 - 1e-6).ceil() as usize;
    sorted.get(rank.max(1) - 1).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_of_odd_even_and_none_is_the_middle() {
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&mut [4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(median(&mut [7.0]), Some(7.0));
        assert_eq!(median(&mut []), None);
    }

    #[test]
    fn percentile_of_one_to_thousand_is_the_nearest_rank() {
        let sorted: Vec<f64> = (1..=1000).map(f64::from).collect();
        for (percent, value) in [(0.0, 1.0), (50.0, 500.0), (99.0, 990.0), (99.9, 999.0), (100.0, 1000.0)] {
            assert_eq!(percentile(&sorted, percent), Some(value), "p{percent}");
        }
        assert_eq!(percentile(&[5.0], 99.9), Some(5.0));
        assert_eq!(percentile(&[], 50.0), None);
    }
}
