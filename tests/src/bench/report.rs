//! Figures as a person reads them.

use std::fmt;

use super::series::Series;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    Seconds,
    Milliseconds,
    MiB,
    Plain,
}

/// What a figure may be at most.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limit(pub f64);

/// One measured line.
#[derive(Debug, Clone)]
struct Line {
    label: String,
    unit: Unit,
    series: Series,
    limit: Option<Limit>,
}

/// One thing that is measured, with all that belongs to it.
#[derive(Debug, Clone)]
pub struct Figure {
    title: String,
    lines: Vec<Line>,
    notes: Vec<String>,
}

impl Figure {
    pub fn new(title: impl Into<String>) -> Self {
        let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
        let load = load.split(' ').next().unwrap_or("?").to_owned();
        Self { title: title.into(), lines: Vec::new(), notes: vec![format!("load of the machine at the end: {load}")] }
    }

    #[must_use]
    pub fn line(mut self, label: impl Into<String>, unit: Unit, series: &Series) -> Self {
        self.lines.push(Line { label: label.into(), unit, series: series.clone(), limit: None });
        self
    }

    /// A line whose median is to be at most `limit`.
    #[must_use]
    pub fn judged(mut self, label: impl Into<String>, unit: Unit, series: &Series, limit: Limit) -> Self {
        self.lines.push(Line { label: label.into(), unit, series: series.clone(), limit: Some(limit) });
        self
    }

    #[must_use]
    pub fn note(mut self, note: impl Into<String>) -> Self {
        self.notes.push(note.into());
        self
    }

    /// How many lines have a limit, and how many of them keep it.
    pub fn kept(&self) -> (usize, usize) {
        let judged = self.lines.iter().filter(|l| l.limit.is_some());
        (judged.clone().count(), judged.filter(|l| l.limit.is_some_and(|limit| l.series.median() <= limit.0)).count())
    }
}

impl fmt::Display for Figure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.title)?;
        for line in &self.lines {
            writeln!(f, "  {line}")?;
        }
        for note in &self.notes {
            writeln!(f, "  ({note})")?;
        }
        Ok(())
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { label, unit, series, limit } = self;
        let [median, min, max] = [series.median(), series.min(), series.max()].map(|value| unit.show(value));
        write!(f, "{label:<52} {median:>9}  [{min} … {max}]  n={}", series.len())?;
        let Some(Limit(limit)) = limit else { return Ok(()) };
        let over = series.median() / limit - 1.0;
        let shown = unit.show(*limit);
        if over <= 0.0 { write!(f, "  at most {shown}: kept") } else { write!(f, "  at most {shown}: MISSED by {:.0} %", over * 100.0) }
    }
}

impl Unit {
    fn show(self, value: f64) -> String {
        match self {
            Self::Seconds => format!("{value:.3} s"),
            Self::Milliseconds => format!("{value:.1} ms"),
            Self::MiB => format!("{value:.1} MiB"),
            Self::Plain => format!("{value:.2}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(values: &[f64]) -> Series {
        values.iter().copied().collect()
    }

    #[test]
    fn the_median_decides_and_a_miss_says_by_how_much() {
        let figure =
            Figure::new("x").judged("a", Unit::Plain, &of(&[0.1, 0.5, 9.0]), Limit(0.5)).judged("b", Unit::MiB, &of(&[60.0]), Limit(40.0));
        assert_eq!(figure.kept(), (2, 1));
        let text = figure.to_string();
        assert!(text.contains("at most 0.50: kept") && text.contains("at most 40.0 MiB: MISSED by 50 %"), "{text}");
    }

    #[test]
    fn a_figure_without_measurements_is_not_kept() {
        assert_eq!(Figure::new("x").judged("a", Unit::Plain, &Series::default(), Limit(1.0)).kept(), (1, 0));
    }
}
