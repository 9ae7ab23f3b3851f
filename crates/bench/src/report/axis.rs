// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Computes axes: positions of values, and the values that get a line and a label.

/// Spacing of the figures on an axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    /// Even, from 0 on.
    Linear,
    /// Logarithmic: each step of the same length multiplies by the same number.
    Log,
}

/// Mapping from values to positions on the drawing.
#[derive(Debug)]
pub(super) struct Axis {
    scale: Scale,
    pub from: f64,
    to: f64,
    /// Positions of `from` and `to`.
    start: f64,
    end: f64,
}

impl Axis {
    /// Returns an axis from the least of `values` to the greatest.
    pub fn exactly(scale: Scale, values: &[f64], start: f64, end: f64) -> Self {
        let from = values.iter().copied().fold(f64::INFINITY, f64::min);
        let to = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        Self { scale, from, to, start, end }
    }

    /// Returns an axis with room for all `values`, between round numbers. Values that the scale cannot show do not
    /// count.
    pub fn around(scale: Scale, values: impl Iterator<Item = f64>, start: f64, end: f64) -> Self {
        let values: Vec<_> = values.filter(|v| v.is_finite() && (scale == Scale::Linear || *v > 0.0)).collect();
        let mut axis = Self::exactly(scale, &values, start, end);
        if values.is_empty() {
            (axis.from, axis.to) = (1.0, 10.0);
        }
        match scale {
            Scale::Linear => {
                axis.from = 0.0;
                axis.to = if axis.to > 0.0 { axis.to } else { 1.0 };
                axis.to = (axis.to / axis.step()).ceil() * axis.step();
            }
            Scale::Log => {
                axis.from = round_down(axis.from);
                axis.to = axis.to.max(axis.from * 1.01);
                let up = 10f64.powf(axis.to.log10().floor());
                axis.to =
                    [1.0, 2.0, 5.0, 10.0].map(|n| n * up).into_iter().find(|n| *n >= axis.to * 0.999).unwrap_or(up);
            }
        }
        axis
    }

    pub fn at(&self, value: f64) -> f64 {
        let part = match self.scale {
            _ if self.to <= self.from => 0.5,
            Scale::Linear => (value - self.from) / (self.to - self.from),
            Scale::Log => (value.max(self.from).ln() - self.from.ln()) / (self.to.ln() - self.from.ln()),
        };
        self.start + part.clamp(0.0, 1.0) * (self.end - self.start)
    }

    /// Returns a round step that divides the whole into five to ten parts.
    fn step(&self) -> f64 {
        let rough = (self.to - self.from) / 5.0;
        let power = 10f64.powf(rough.log10().floor());
        let times = [5.0, 2.0, 1.0].into_iter().find(|n| n * power <= rough * 1.0001).unwrap_or(1.0);
        times * power
    }

    /// Returns the values that get a line and a label.
    pub fn ticks(&self) -> Vec<f64> {
        match self.scale {
            Scale::Linear => {
                let step = self.step();
                (0..=(self.to / step).round() as usize).map(|i| i as f64 * step).collect()
            }
            Scale::Log => {
                let decades = self.to.log10() - self.from.log10();
                let steps: &[f64] = if decades > 2.5 { &[1.0] } else { &[1.0, 2.0, 5.0] };
                self.decades(steps)
            }
        }
    }

    /// Returns the values that get a faint line.
    pub fn fine(&self) -> Vec<f64> {
        match self.scale {
            Scale::Linear => Vec::new(),
            Scale::Log => self.decades(&[2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]),
        }
    }

    fn decades(&self, steps: &[f64]) -> Vec<f64> {
        let (first, last) = (self.from.log10().floor() as i32, self.to.log10().ceil() as i32);
        let all = (first..=last).flat_map(|power| steps.iter().map(move |step| step * 10f64.powi(power)));
        all.filter(|v| (self.from * 0.999..=self.to * 1.001).contains(v)).collect()
    }
}

/// Returns the nearest of 1, 2, 5, 10, 20, … below.
fn round_down(value: f64) -> f64 {
    let power = 10f64.powf(value.log10().floor());
    [5.0, 2.0, 1.0].map(|n| n * power).into_iter().find(|n| *n <= value * 1.001).unwrap_or(power)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn axis(scale: Scale, values: &[f64]) -> Axis {
        Axis::around(scale, values.iter().copied(), 0.0, 100.0)
    }

    #[test]
    fn axis_of_any_values_has_a_few_round_ticks_around_them() {
        for (values, ticks) in [
            (vec![3.0, 62.0], vec![0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0]),
            (vec![0.021], vec![0.0, 0.002, 0.004, 0.006, 0.008, 0.01, 0.012, 0.014, 0.016, 0.018, 0.02, 0.022]),
            (vec![0.0], vec![0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        ] {
            let found = axis(Scale::Linear, &values).ticks();
            assert!(
                found.len() == ticks.len() && found.iter().zip(&ticks).all(|(a, b)| (a - b).abs() < 1e-9),
                "{found:?}"
            );
        }
        assert_eq!(axis(Scale::Log, &[120.0, 4800.0]).ticks(), [100.0, 200.0, 500.0, 1e3, 2e3, 5e3]);
        assert_eq!(axis(Scale::Log, &[8e6, 6e10]).ticks(), [1e7, 1e8, 1e9, 1e10, 1e11]);
    }

    #[test]
    fn axis_of_nothing_negative_or_one_value_places_all_on_itself() {
        for values in [&[][..], &[5.0], &[-3.0, 0.0], &[f64::NAN, f64::INFINITY], &[1e-300, 1e300], &[7.0, 7.0]] {
            for scale in [Scale::Linear, Scale::Log] {
                let axis = axis(scale, values);
                for value in [f64::MIN, -1.0, 0.0, 5.0, f64::MAX] {
                    let at = axis.at(value);
                    assert!((0.0..=100.0).contains(&at), "{values:?} {scale:?}: {value} at {at}");
                }
                assert!(axis.ticks().len() < 1000, "{values:?} {scale:?}");
            }
        }
    }
}
