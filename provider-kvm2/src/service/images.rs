//! Pages over the images of an entry.
//!
//! The provider answers all images at once: there are few. A token names the
//! last image of its page and what was asked for, so it survives images that
//! come and go between pages and is refused by another request.

use egress_provider_proto::v1;
use serde::{Deserialize, Serialize};

use super::answer;
use super::status::Fault;
use crate::config::Entry;
use crate::error::{ProviderError, Reason};
use crate::image::ImageStatus;

/// Where an image stands in the listing: host as configured, volume, key.
type Position = (usize, String, String);

#[derive(Serialize, Deserialize)]
struct Token {
    entry: String,
    zone: String,
    after: Position,
}

/// One page of `all`; the names of the next page's token.
pub(super) fn page(entry: &Entry, zone: &str, token: &str, size: usize, all: Vec<ImageStatus>) -> Result<(Vec<v1::Image>, String), Fault> {
    let after = if token.is_empty() { None } else { Some(decode(token, entry, zone)?) };
    let mut rows: Vec<(Position, ImageStatus)> = all
        .into_iter()
        .filter(|i| zone.is_empty() || i.host == zone)
        .map(|i| (position(entry, &i), i))
        .filter(|(at, _)| after.as_ref().is_none_or(|after| at > after))
        .collect();
    rows.sort_by(|(a, _), (b, _)| a.cmp(b));
    let more = rows.len() > size;
    rows.truncate(size);
    let next = match rows.last() {
        Some((at, _)) if more => encode(&Token { entry: entry.name.clone(), zone: zone.to_owned(), after: at.clone() }),
        _ => String::new(),
    };
    Ok((rows.into_iter().map(|(_, i)| answer::image(i, entry)).collect(), next))
}

fn position(entry: &Entry, image: &ImageStatus) -> Position {
    let host = entry.hosts.iter().position(|h| h.name == image.host).unwrap_or(usize::MAX);
    (host, image.volume.clone().unwrap_or_default(), image.key.clone())
}

fn encode(token: &Token) -> String {
    // three strings and a number: this cannot fail
    hex::encode(serde_json::to_vec(token).unwrap_or_default())
}

fn decode(text: &str, entry: &Entry, zone: &str) -> Result<Position, Fault> {
    let token = hex::decode(text).ok().and_then(|bytes| serde_json::from_slice::<Token>(&bytes).ok());
    match token {
        Some(token) if token.entry == entry.name && token.zone == zone => Ok(token.after),
        _ => {
            let e = ProviderError::invalid(
                Reason::PageTokenInvalid,
                "page_token",
                "page_token was not made for this request: list again without it",
            );
            Err(e.into())
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;
    use crate::config::{ImageFormat, ImageUrl};
    use crate::image::ImageState;
    use crate::service::fixtures;

    fn image(host: &str, key: &str) -> ImageStatus {
        ImageStatus {
            entry: "lab".into(),
            host: host.into(),
            key: key.into(),
            url: ImageUrl::parse("https://user:s3nt1nel@images.example/a.qcow2?token=s3nt1nel").expect("a URL"),
            state: ImageState::Ready,
            bytes_done: 1,
            bytes_total: Some(1),
            volume: Some(format!("base-lab-{key}-01234567.qcow2")),
            digest: None,
            virtual_size: None,
            format: ImageFormat::Qcow2,
            since: SystemTime::UNIX_EPOCH,
            last_error: None,
        }
    }

    #[test]
    fn pages_hold_every_image_once_in_the_order_of_the_configuration() {
        let entry = fixtures::entry("lab", &["hv2", "hv1"]);
        let all = || vec![image("hv1", "b"), image("hv1", "a"), image("hv2", "c")];
        let (mut token, mut seen) = (String::new(), Vec::new());
        loop {
            let (rows, next) = page(&entry, "", &token, 2, all()).expect("a good token");
            assert!(rows.len() <= 2);
            seen.extend(rows.into_iter().map(|i| (i.host, i.key)));
            token = next;
            if token.is_empty() {
                break;
            }
        }
        let row = |h: &str, k: &str| (h.to_owned(), k.to_owned());
        assert_eq!(seen, [row("hv2", "c"), row("hv1", "a"), row("hv1", "b")]);
    }

    #[test]
    fn a_token_of_another_request_is_refused() {
        let entry = fixtures::entry("lab", &["hv1", "hv2"]);
        let (_, token) = page(&entry, "", "", 1, vec![image("hv1", "a"), image("hv1", "b")]).expect("no token");
        for (zone, token) in [("hv1", token.as_str()), ("", "zz"), ("", "7b7d")] {
            assert!(page(&entry, zone, token, 1, Vec::new()).is_err(), "{zone} {token}");
        }
    }

    #[test]
    fn an_image_is_shown_without_the_secrets_of_its_url() {
        let entry = fixtures::entry("lab", &["hv1"]);
        let (rows, _) = page(&entry, "", "", 10, vec![image("hv1", "a")]).expect("no token");
        assert!(!format!("{rows:?}").contains("s3nt1nel"), "{rows:?}");
        assert_eq!(rows[0].pool, "default");
    }
}
