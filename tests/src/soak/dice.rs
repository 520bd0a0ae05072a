//! Random numbers that stay the same: a seed has to mean the same plan after any update of a library.

/// SplitMix64.
#[derive(Debug, Clone)]
pub struct Dice(u64);

impl Dice {
    /// A sequence of its own for each `stream` of a seed.
    pub fn new(seed: u64, stream: u64) -> Self {
        let mut dice = Self(seed ^ stream.wrapping_mul(0xd6e8_feb8_6659_fd93));
        dice.roll();
        dice
    }

    pub fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From `low` up to and without `high`.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.roll() % (high - low)
    }

    pub fn index(&mut self, len: usize) -> usize {
        usize::try_from(self.roll() % len as u64).expect("below a usize")
    }

    /// True this often in a hundred.
    pub fn percent(&mut self, often: u64) -> bool {
        self.roll() % 100 < often
    }

    /// One of some, each with its weight.
    pub fn weighted<T: Copy>(&mut self, choices: &[(u64, T)]) -> T {
        let mut at = self.roll() % choices.iter().map(|(weight, _)| weight).sum::<u64>();
        for (weight, choice) in choices {
            match at.checked_sub(*weight) {
                Some(rest) => at = rest,
                None => return *choice,
            }
        }
        unreachable!("the sum of the weights bounds the number")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_means_the_same_numbers_for_ever() {
        let mut dice = Dice::new(1, 100);
        assert_eq!([dice.roll(), dice.roll(), dice.roll()], [0x6b5292eb2aa46281, 0xfa424081bc8fe65c, 0xc425cfa26c0acc55]);
    }

    #[test]
    fn a_weight_is_how_often_a_choice_comes() {
        let mut dice = Dice::new(1, 1);
        let often = (0..1000).filter(|_| dice.weighted(&[(1, false), (9, true), (0, false)])).count();
        assert!((850..950).contains(&often), "{often}");
    }
}
