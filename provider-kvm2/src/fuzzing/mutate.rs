//! A small deterministic mutator: the same seed gives the same inputs on every machine.

/// Longest input that is made, in bytes.
const MAX_LEN: usize = 256 << 10;

/// Numbers at which parsers break, in both byte orders as it comes.
const NUMBERS: [u64; 10] = [0, 1, 0x7f, 0xff, 0x7fff, 0xffff, 0x7fff_ffff, 0xffff_ffff, i64::MAX as u64, u64::MAX];

/// What means something to one parser or another.
const WORDS: [&str; 24] = [
    "<",
    "/>",
    "<!DOCTYPE a>",
    "<![CDATA[",
    "]]>",
    "<!--",
    "&#27;",
    "&#0;",
    "&#x202e;",
    "&amp;",
    "'",
    "\"",
    "\0",
    "\n",
    "\t",
    " ",
    "..",
    "/",
    "-",
    "@revoked ",
    "*",
    "!",
    "18446744073709551616",
    "\u{202e}",
];

#[derive(Debug)]
pub(crate) struct Mutator {
    state: u64,
}

impl Mutator {
    pub(crate) fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// SplitMix64.
    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below `limit`; 0 for a limit of 0.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        (self.next() % (limit.max(1) as u64)) as usize
    }

    /// The input, changed in one to four places; `other` is where splices come from.
    pub(crate) fn mutate(&mut self, input: &[u8], other: &[u8]) -> Vec<u8> {
        let mut bytes = input.to_vec();
        for _ in 0..=self.below(4) {
            self.once(&mut bytes, other);
            bytes.truncate(MAX_LEN);
        }
        bytes
    }

    fn once(&mut self, bytes: &mut Vec<u8>, other: &[u8]) {
        let at = self.below(bytes.len() + 1);
        let part = self.range(bytes.len());
        match self.below(9) {
            0 if !bytes.is_empty() => {
                let at = self.below(bytes.len());
                bytes[at] ^= 1 << self.below(8);
            }
            1 if !bytes.is_empty() => {
                let at = self.below(bytes.len());
                bytes[at] = self.next() as u8;
            }
            // cut out, cut off
            2 => drop(bytes.drain(part)),
            3 => bytes.truncate(at),
            // said twice, or many times
            4 => {
                let copy = bytes[part].repeat(if self.below(8) == 0 { 100 } else { 1 });
                drop(bytes.splice(at..at, copy));
            }
            5 => {
                let word = WORDS[self.below(WORDS.len())];
                drop(bytes.splice(at..at, word.bytes()));
            }
            6 => {
                let number = NUMBERS[self.below(NUMBERS.len())];
                let width = [1, 2, 4, 8][self.below(4)];
                let coded =
                    if self.below(2) == 0 { number.to_be_bytes()[8 - width..].to_vec() } else { number.to_le_bytes()[..width].to_vec() };
                let end = (at + width).min(bytes.len());
                drop(bytes.splice(at..end, coded));
            }
            7 => {
                let digits = NUMBERS[self.below(NUMBERS.len())].to_string();
                let end = bytes[at..].iter().position(|b| !b.is_ascii_digit()).map_or(bytes.len(), |n| at + n);
                drop(bytes.splice(at..end, digits.into_bytes()));
            }
            _ => {
                let piece = self.range(other.len());
                drop(bytes.splice(part, other[piece].iter().copied()));
            }
        }
    }

    fn range(&mut self, length: usize) -> std::ops::Range<usize> {
        let start = self.below(length + 1);
        let most = if self.below(3) == 0 { length } else { 32 };
        start..(start + self.below(most + 1)).min(length)
    }
}
