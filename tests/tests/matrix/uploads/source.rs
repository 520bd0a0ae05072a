//! Image servers that do one thing wrong, or something odd that is no fault.

use std::time::Duration;

use egress_provider_proto::v1::ErrorReason as Reason;
use lab_tests::{Answer, Outcome, Refusal};

use super::{By, Expected, Rig};

/// As it goes into `Retry-After`.
const RETRY_AFTER: u64 = 7;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    /// Cut at so many per cent, and gone afterwards.
    Cut(usize),
    /// Reset in the middle, and gone afterwards.
    Reset,
    /// Cut, then continued.
    CutOnce,
    /// Cut, then sent from the start by a server without ranges.
    CutWithoutRanges,
    /// Cut, and replaced by another file of that length.
    Replaced,
    Stalls,
    /// Never stands still and does not get ready either.
    Drips,
    Chunked,
    Unframed,
    AnnouncesMore,
    AnnouncesLess,
    HeadRefused,
    HeadLies,
    PartialUnasked,
    PartialOther,
    RedirectsAcross,
    RedirectsInCircles,
    RedirectsToPrivate,
    RedirectsToLinkLocal,
    /// Every third mirror lacks the image.
    ThirdMirrorLacks,
    Throttles,
    Gone,
    Html,
    Gzip,
    WrongDigest,
}

impl Source {
    pub(super) const ALL: [Self; 27] = [
        Self::Cut(10),
        Self::Cut(50),
        Self::Cut(99),
        Self::Reset,
        Self::CutOnce,
        Self::CutWithoutRanges,
        Self::Replaced,
        Self::Stalls,
        Self::Drips,
        Self::Chunked,
        Self::Unframed,
        Self::AnnouncesMore,
        Self::AnnouncesLess,
        Self::HeadRefused,
        Self::HeadLies,
        Self::PartialUnasked,
        Self::PartialOther,
        Self::RedirectsAcross,
        Self::RedirectsInCircles,
        Self::RedirectsToPrivate,
        Self::RedirectsToLinkLocal,
        Self::ThirdMirrorLacks,
        Self::Throttles,
        Self::Gone,
        Self::Html,
        Self::Gzip,
        Self::WrongDigest,
    ];

    fn script(self, rig: &Rig, n: usize) -> Vec<Answer> {
        let all = rig.bytes.len();
        let half = all / 2;
        let gone = Answer::Status(404, vec![]);
        let redirect = |to: String| Answer::Redirect(302, to);
        match self {
            Self::Cut(per_cent) => vec![Answer::Truncated(all * per_cent / 100), gone],
            Self::Reset => vec![Answer::ResetAt(half), gone],
            Self::CutOnce => vec![Answer::Truncated(half), Answer::Whole],
            Self::CutWithoutRanges => vec![Answer::Truncated(half), Answer::RangesRefused],
            Self::Replaced => vec![Answer::Truncated(half), Answer::Replaced],
            Self::Stalls => vec![Answer::StallAt(half)],
            Self::Drips => vec![Answer::Trickle(1000, Duration::from_millis(20))],
            Self::Chunked => vec![Answer::Chunked],
            Self::Unframed => vec![Answer::Unframed],
            Self::AnnouncesMore => vec![Answer::Announced(all as u64 + 512), Answer::Whole],
            Self::AnnouncesLess => vec![Answer::Announced(all as u64 - 512)],
            Self::HeadRefused | Self::HeadLies | Self::WrongDigest => vec![Answer::Whole],
            Self::PartialUnasked => vec![Answer::PartialUnasked],
            Self::PartialOther => vec![Answer::PartialFrom(4096)],
            Self::RedirectsAcross => vec![redirect(rig.mirror.url(&format!("i{n}")))],
            Self::RedirectsInCircles => vec![redirect(rig.server.url(&format!("i{n}")))],
            // by https, so that it is not the scheme that is refused
            Self::RedirectsToPrivate => vec![redirect("https://10.0.0.1/i".to_owned())],
            Self::RedirectsToLinkLocal => vec![redirect("https://169.254.169.254/latest/meta-data".to_owned())],
            Self::ThirdMirrorLacks => {
                let mirrors = [format!("i{n}"), format!("i{n}"), "absent".to_owned()];
                // one more than three: each try begins with the mirror after the one that the try before ended with
                (n..n + 4).map(|turn| redirect(rig.mirror.url(&mirrors[turn % 3]))).collect()
            }
            Self::Throttles => vec![Answer::Status(429, vec![("Retry-After", RETRY_AFTER.to_string())])],
            Self::Gone => vec![gone],
            Self::Html => vec![Answer::Html],
            Self::Gzip => vec![Answer::ContentEncodingGzip],
        }
    }

    fn by(self) -> By {
        if matches!(self, Self::Stalls | Self::Drips) { By::Brief } else { By::Plain }
    }

    /// Key or URL.
    fn image(self, rig: &Rig, n: usize) -> String {
        match self {
            // a catalogue's URL is trusted: the policy is for those of a placement
            Self::RedirectsToPrivate | Self::RedirectsToLinkLocal => rig.server.url(&format!("i{n}")),
            Self::AnnouncesLess => format!("good{n}"),
            Self::WrongDigest => format!("wrong{n}"),
            _ => format!("i{n}"),
        }
    }

    fn expected(self) -> Expected {
        use Expected::{Refused, Stored};
        match self {
            Self::CutOnce
            | Self::CutWithoutRanges
            | Self::Chunked
            | Self::HeadRefused
            | Self::HeadLies
            | Self::PartialUnasked
            | Self::RedirectsAcross
            | Self::ThirdMirrorLacks => Stored,
            Self::Cut(_) | Self::Reset | Self::Gone => Refused(&[Reason::ImageNotFound], "correct its URL"),
            Self::Replaced | Self::AnnouncesMore => Refused(&[Reason::ImageSourceBroken], "the next attempt"),
            Self::Stalls | Self::Drips => Refused(&[Reason::CallTimeout], "budgets.uploadImage"),
            Self::Unframed => Refused(&[Reason::ImageSourceBroken], "Content-Length"),
            Self::PartialOther => Refused(&[Reason::ImageSourceBroken], "another server"),
            Self::RedirectsInCircles => Refused(&[Reason::ImageSourceBroken], "name its final URL"),
            Self::RedirectsToPrivate | Self::RedirectsToLinkLocal => Refused(&[Reason::ImageUrlForbidden], "urlPolicy"),
            Self::Throttles => Refused(&[Reason::ImageSourceUnavailable], "429"),
            Self::Html => Refused(&[Reason::ImageFormatMismatch], "correct its URL"),
            Self::Gzip => Refused(&[Reason::ImageSourceBroken], "switch that off"),
            Self::AnnouncesLess | Self::WrongDigest => Refused(&[Reason::DigestMismatch], "correct the configuration"),
        }
    }

    pub(super) async fn upload(self, rig: &Rig, n: usize) -> Outcome {
        let path = format!("i{n}");
        rig.server.serve(&path, rig.bytes.clone(), self.script(rig, n));
        match self {
            Self::HeadRefused => rig.server.set_head(&path, Answer::Status(405, vec![])),
            Self::HeadLies => rig.server.set_head(&path, Answer::Announced(0)),
            Self::RedirectsAcross | Self::ThirdMirrorLacks => rig.mirror.serve(&path, rig.bytes.clone(), [Answer::Whole]),
            _ => {}
        }
        let (by, vm, image) = (self.by(), rig.vm(n), self.image(rig, n));
        let mut result = rig.create(by, &vm, &image).await;
        if let (Self::ThirdMirrorLacks, Err(e)) = (self, &result) {
            let refusal = Refusal::of(e);
            if refusal.reason != Reason::ImageSourceUnavailable {
                return Outcome::wrong(format!("a mirror that lacks it: {refusal:?}"));
            }
            result = rig.create(by, &vm, &image).await;
        }
        let told = result.as_ref().err().and_then(|e| Refusal::of(e).retry_after);
        let mut outcome = rig.judge(by, n, result, self.expected()).await;
        if self == Self::Throttles && told != Some(Duration::from_secs(RETRY_AFTER)) {
            outcome.wrong.push(format!("RetryInfo says {told:?}, the server {RETRY_AFTER} s"));
        }
        outcome
    }
}
