//! Repeated measurements of one thing.

use std::time::{Duration, Instant};

/// Values in the order in which they were measured.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Series(Vec<f64>);

impl Series {
    pub fn push(&mut self, value: f64) {
        self.0.push(value);
    }

    pub fn push_seconds(&mut self, took: Duration) {
        self.push(took.as_secs_f64());
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// NaN of an empty series.
    pub fn median(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        match sorted.len() {
            0 => f64::NAN,
            n if n % 2 == 1 => sorted[middle],
            _ => f64::midpoint(sorted[middle - 1], sorted[middle]),
        }
    }

    pub fn min(&self) -> f64 {
        self.0.iter().copied().fold(f64::NAN, f64::min)
    }

    pub fn max(&self) -> f64 {
        self.0.iter().copied().fold(f64::NAN, f64::max)
    }

    /// The ratio of each pair; what was measured side by side is compared side by side.
    #[must_use]
    pub fn over(&self, other: &Self) -> Self {
        Self(self.0.iter().zip(&other.0).map(|(a, b)| a / b).collect())
    }
}

impl FromIterator<f64> for Series {
    fn from_iter<I: IntoIterator<Item = f64>>(values: I) -> Self {
        Self(values.into_iter().collect())
    }
}

/// How long it takes, and what comes of it.
pub async fn timed<T>(work: impl Future<Output = T>) -> (Duration, T) {
    let start = Instant::now();
    let result = work.await;
    (start.elapsed(), result)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_number_lies_between_the_middle_two() {
        let series: Series = [4.0, 1.0, 3.0, 10.0].into_iter().collect();
        assert_eq!((series.min(), series.median(), series.max()), (1.0, 3.5, 10.0));
    }

    #[test]
    fn a_ratio_is_taken_of_each_pair() {
        let (ours, theirs): (Series, Series) = ([1.0, 9.0].into_iter().collect(), [2.0, 3.0].into_iter().collect());
        assert_eq!(ours.over(&theirs), [0.5, 3.0].into_iter().collect());
    }

    #[test]
    fn nothing_measured_is_no_number() {
        let none = Series::default();
        assert!(none.is_empty() && none.median().is_nan() && none.min().is_nan() && none.max().is_nan());
    }
}
