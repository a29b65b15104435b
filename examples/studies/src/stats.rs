//! Means and intervals over seeds, and times to a loss.

/// A mean of some values with its 95 % interval, mean ± half.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    pub mean: f64,
    /// None for a single value.
    pub half: Option<f64>,
}

/// 97.5 % quantiles of Student's t for 1, 2, … degrees of freedom.
const T: [f64; 9] = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262];

impl Estimate {
    /// None without values. From a normal distribution's sample, with Student's t.
    pub fn of(values: &[f64]) -> Option<Estimate> {
        let n = values.len() as f64;
        let mean = (!values.is_empty()).then(|| values.iter().sum::<f64>() / n)?;
        let half = (values.len() > 1).then(|| {
            let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (n - 1.0);
            let quantile = T.get(values.len() - 2).copied().unwrap_or(1.96);
            quantile * (variance / n).sqrt()
        });
        Some(Estimate { mean, half })
    }

    pub fn low(&self) -> f64 {
        self.mean - self.half.unwrap_or(0.0)
    }

    pub fn high(&self) -> f64 {
        self.mean + self.half.unwrap_or(0.0)
    }

    /// `1.234 ± 0.005`, to `digits`; with a sign if it is a difference.
    pub fn text(&self, digits: usize, signed: bool) -> String {
        let mean = if signed { format!("{:+.digits$}", self.mean) } else { format!("{:.digits$}", self.mean) };
        self.half.map_or(mean.clone(), |half| format!("{mean} ± {half:.digits$}"))
    }
}

/// Segments that a point of a smoothed curve is the mean of.
const WINDOW: usize = 6;

/// Running means of a curve of equal segments: (segments done, mean of the last [`WINDOW`]).
pub fn smoothed(curve: &[f64]) -> Vec<(f64, f64)> {
    let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len() as f64;
    curve.windows(WINDOW).enumerate().map(|(n, part)| ((n + WINDOW) as f64, mean(part))).collect()
}

/// The share of the run (0..1) after which a smoothed curve first is at or below `target`, interpolated.
pub fn share_to(curve: &[f64], target: f64) -> Option<f64> {
    let points = smoothed(curve);
    let at = points.iter().position(|&(_, loss)| loss <= target)?;
    let (x1, y1) = points[at];
    let x = match at.checked_sub(1).map(|before| points[before]) {
        Some((x0, y0)) if y0 > y1 => x0 + (x1 - x0) * (y0 - target) / (y0 - y1),
        _ => x1,
    };
    Some(x / curve.len() as f64)
}

/// The last value of a smoothed curve.
pub fn last(curve: &[f64]) -> Option<f64> {
    smoothed(curve).last().map(|&(_, loss)| loss)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_are_students() {
        assert_eq!(Estimate::of(&[]), None);
        assert_eq!(Estimate::of(&[2.0]), Some(Estimate { mean: 2.0, half: None }));
        let three = Estimate::of(&[1.0, 2.0, 3.0]).unwrap();
        assert_eq!(three.mean, 2.0);
        assert!((three.half.unwrap() - 4.303 / 3f64.sqrt()).abs() < 1e-9);
        assert_eq!(three.text(2, true), "+2.00 ± 2.48");
        assert!((three.low() + 0.484).abs() < 1e-3 && (three.high() - 4.484).abs() < 1e-3);
    }

    #[test]
    fn times_to_a_loss_are_interpolated() {
        // Falls by 0.1 a segment: the running mean over six is the middle's value.
        let curve: Vec<f64> = (0..20).map(|n| 4.0 - 0.1 * f64::from(n)).collect();
        assert!((last(&curve).unwrap() - 2.35).abs() < 1e-9);
        let share = share_to(&curve, 3.0).unwrap();
        assert!((share - 13.5 / 20.0).abs() < 1e-9, "{share}");
        assert_eq!(share_to(&curve, 2.0), None);
        assert_eq!(share_to(&curve[..3], 9.0), None);
    }
}
