//! `Debug` for the messages that carry a secret, so that no log line and no panic prints it.
//!
//! User-data shows as its length. Of an image URL the user-info, the query and the fragment are
//! hidden: mirrors take tokens there.

use std::fmt;

use crate::v1::{CloudInit, EvictImageRequest, GetImageRequest, Placement, PrepareImageRequest, WatchImageRequest, evict_image_request};

/// Catalogue key or URL, printed without what may be secret in a URL.
struct ImageName<'a>(&'a str);

impl fmt::Debug for ImageName<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((scheme, rest)) = self.0.split_once("://") else {
            // No key of the catalogue has these; what has them may be a mistyped URL.
            return match self.0.find(['@', '?', '#']) {
                Some(_) => f.write_str("\"[REDACTED]\""),
                None => fmt::Debug::fmt(self.0, f),
            };
        };
        let (path_and_host, hidden) = match rest.split_once(['?', '#']) {
            Some((shown, _)) => (shown, "?[REDACTED]"),
            None => (rest, ""),
        };
        let (authority, path) = match path_and_host.find('/') {
            Some(at) => path_and_host.split_at(at),
            None => (path_and_host, ""),
        };
        let host = match authority.rsplit_once('@') {
            Some((_, host)) => format!("[REDACTED]@{host}"),
            None => authority.to_owned(),
        };
        fmt::Debug::fmt(&format!("{scheme}://{host}{path}{hidden}"), f)
    }
}

impl fmt::Debug for CloudInit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { user_data } = self;
        f.debug_struct("CloudInit").field("user_data", &format_args!("<{} bytes>", user_data.len())).finish()
    }
}

impl fmt::Debug for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { zone, region, machine_type, image } = self;
        f.debug_struct("Placement")
            .field("zone", zone)
            .field("region", region)
            .field("machine_type", machine_type)
            .field("image", &ImageName(image))
            .finish()
    }
}

impl fmt::Debug for PrepareImageRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { entry, zone, image, max_wait } = self;
        f.debug_struct("PrepareImageRequest")
            .field("entry", entry)
            .field("zone", zone)
            .field("image", &ImageName(image))
            .field("max_wait", max_wait)
            .finish()
    }
}

impl fmt::Debug for GetImageRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { entry, zone, image } = self;
        f.debug_struct("GetImageRequest").field("entry", entry).field("zone", zone).field("image", &ImageName(image)).finish()
    }
}

impl fmt::Debug for WatchImageRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { entry, zone, image } = self;
        f.debug_struct("WatchImageRequest").field("entry", entry).field("zone", zone).field("image", &ImageName(image)).finish()
    }
}

impl fmt::Debug for EvictImageRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { entry, zone, target } = self;
        f.debug_struct("EvictImageRequest").field("entry", entry).field("zone", zone).field("target", target).finish()
    }
}

impl fmt::Debug for evict_image_request::Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Image(image) => f.debug_tuple("Image").field(&ImageName(image)).finish(),
            Self::Volume(volume) => f.debug_tuple("Volume").field(volume).finish(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::v1::CreateRequest;

    const SENTINEL: &str = "s3nt1nel";

    fn secret_url() -> String {
        format!("https://{SENTINEL}:{SENTINEL}@mirror.example/a@b.qcow2?token={SENTINEL}#{SENTINEL}")
    }

    #[test]
    fn debug_of_create_request_prints_no_secret() {
        let request = CreateRequest {
            name: "web-1".into(),
            placement: Some(Placement { image: secret_url(), ..Placement::default() }),
            cloud_init: Some(CloudInit { user_data: SENTINEL.into() }),
            ..CreateRequest::default()
        };
        for text in [format!("{request:?}"), format!("{request:#?}")] {
            assert!(!text.contains(SENTINEL), "{text}");
            // A byte slice would print its numbers.
            assert!(!text.contains(&SENTINEL.as_bytes()[0].to_string()), "{text}");
            assert!(text.contains("user_data: <8 bytes>"), "{text}");
            assert!(text.contains("web-1"), "{text}");
            assert!(text.contains("https://[REDACTED]@mirror.example/a@b.qcow2?[REDACTED]"), "{text}");
        }
    }

    #[test]
    fn debug_of_image_requests_prints_no_secret() {
        let image = secret_url();
        let texts = [
            format!("{:?}", PrepareImageRequest { image: image.clone(), ..Default::default() }),
            format!("{:?}", GetImageRequest { image: image.clone(), ..Default::default() }),
            format!("{:?}", WatchImageRequest { image: image.clone(), ..Default::default() }),
            format!("{:?}", EvictImageRequest { target: Some(evict_image_request::Target::Image(image)), ..Default::default() }),
        ];
        for text in texts {
            assert!(!text.contains(SENTINEL), "{text}");
            assert!(text.contains("mirror.example"), "{text}");
        }
    }

    #[test]
    fn image_names_show_what_is_not_secret() {
        let shown = |name: &str| format!("{:?}", ImageName(name));
        assert_eq!(shown("debian-13"), r#""debian-13""#);
        assert_eq!(shown("http://h"), r#""http://h""#);
        assert_eq!(shown("https://h/a.raw"), r#""https://h/a.raw""#);
        assert_eq!(shown("https://h?k=v"), r#""https://h?[REDACTED]""#);
        assert_eq!(shown("user:pw@h/a.raw"), r#""[REDACTED]""#);
        assert_eq!(shown("a\nb"), r#""a\nb""#);
    }
}
