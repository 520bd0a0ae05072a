use super::testing::{QUICK, Reply, Request, Server, file};
use super::*;
use crate::config::{ImageFormat, ImageUrl};
use crate::image::UrlTrust;
use rstest::rstest;

const LIMIT: u64 = 1 << 20;
const TAG: &str = "\"v1\"";

fn content() -> Vec<u8> {
    (0..100_000u32).flat_map(u32::to_le_bytes).collect()
}

/// Only what a request of a known URL needs of a policy.
fn policy() -> UrlPolicy {
    crate::image::tests::entry().url_policy.clone()
}

async fn open(server: &Server) -> Result<Body> {
    Source::new(QUICK).open(&server.image(ImageFormat::Raw), &policy(), LIMIT).await
}

async fn read(server: &Server) -> Result<Vec<u8>> {
    let mut body = open(server).await?;
    let mut out = Vec::new();
    while let Some(bytes) = body.chunk().await? {
        assert!(!bytes.is_empty());
        out.extend_from_slice(&bytes);
    }
    Ok(out)
}

/// The reason, after a look that the error keeps the URL's secret.
fn reason(result: Result<impl std::fmt::Debug>) -> Reason {
    let e = result.expect_err("the image is refused");
    assert!(!format!("{e:?} {:?}", e.metadata()).contains("SENTINEL"), "{e:?}");
    e.reason()
}

#[tokio::test]
async fn a_whole_body_is_read_with_its_length() {
    let server = Server::start(|r| file(r, &content(), TAG)).await;
    let body = open(&server).await.unwrap();
    assert_eq!((body.length(), body.etag()), (Some(400_000), Some(TAG)));
    assert_eq!(read(&server).await.unwrap(), content());
    let requests = server.requests();
    assert_eq!(requests[0].header("accept-encoding"), Some("identity"));
    assert_eq!(requests[0].path, "/image?token=SENTINEL", "the exact URL is asked for");
}

#[tokio::test]
async fn a_chunked_body_has_no_length_and_is_read_whole() {
    let server = Server::start(|_| Reply::chunked(&[], &content())).await;
    assert_eq!(open(&server).await.unwrap().length(), None);
    assert_eq!(read(&server).await.unwrap(), content());
}

#[rstest]
#[case::cut(|r: Reply| r.cut(150_000))]
#[case::stall(|r: Reply| r.stalled(150_000))]
#[case::cut_before_the_first_byte(|r: Reply| r.cut(0))]
#[tokio::test]
async fn a_broken_body_is_continued_where_it_broke(#[case] damage: fn(Reply) -> Reply) {
    let mut first = true;
    let server = Server::start(move |r| {
        let reply = file(r, &content(), TAG);
        if std::mem::take(&mut first) { damage(reply) } else { reply }
    })
    .await;
    assert_eq!(read(&server).await.unwrap(), content());
    assert_eq!(server.requests().len(), 2);
}

#[tokio::test]
async fn a_broken_body_without_an_etag_is_continued_by_its_date() {
    const DATE: &str = "Tue, 06 Jan 2026 08:00:00 GMT";
    let mut first = true;
    let server = Server::start(move |r| match (std::mem::take(&mut first), r.header("if-range")) {
        (true, _) => Reply::whole(200, &[("last-modified", DATE), ("etag", "W/\"weak\"")], &content()).cut(4),
        (_, Some(DATE)) => {
            let headers = [("last-modified", DATE), ("etag", "W/\"weak\""), ("content-range", "bytes 4-399999/400000")];
            Reply::whole(206, &headers, &content()[4..])
        }
        _ => Reply::whole(400, &[], b""),
    })
    .await;
    assert_eq!(read(&server).await.unwrap(), content());
}

#[tokio::test]
async fn a_server_without_ranges_sends_all_again_and_what_was_read_is_skipped() {
    let mut first = true;
    let server = Server::start(move |_| {
        let reply = Reply::whole(200, &[("etag", TAG)], &content());
        if std::mem::take(&mut first) { reply.cut(150_000) } else { reply }
    })
    .await;
    assert_eq!(read(&server).await.unwrap(), content());
}

#[rstest]
#[case::another_etag(Reply::whole(200, &[("etag", "\"v2\"")], &[1; 400_000]))]
#[case::another_length(Reply::whole(200, &[("etag", TAG)], &[1; 400_001]))]
#[case::another_part(Reply::whole(206, &[("etag", TAG), ("content-range", "bytes 5-399999/400000")], &[1; 399_995]))]
#[case::a_longer_file(Reply::whole(206, &[("etag", TAG), ("content-range", "bytes 4-400000/400001")], &[1; 399_997]))]
#[case::no_longer_there_at_that_place(Reply::whole(416, &[], b""))]
#[tokio::test]
async fn a_file_that_changed_under_the_download_is_refused(#[case] second: Reply) {
    let first = Reply::whole(200, &[("etag", TAG)], &content()).cut(4);
    let server = Server::scripted([first, second]).await;
    assert_eq!(reason(read(&server).await), Reason::ImageSourceBroken);
}

#[tokio::test]
async fn a_body_that_breaks_again_and_again_is_given_up() {
    let server = Server::scripted([Reply::whole(200, &[("etag", TAG)], &content()).cut(0)]).await;
    assert_eq!(reason(read(&server).await), Reason::ImageSourceBroken);
    assert_eq!(server.requests().len() as u32, 1 + QUICK.tries);
}

#[tokio::test]
async fn a_broken_body_that_cannot_be_told_from_another_is_given_up_at_once() {
    let server = Server::scripted([Reply::whole(200, &[], &content()).cut(4), Reply::whole(200, &[], &content())]).await;
    assert_eq!(reason(read(&server).await), Reason::ImageSourceBroken);
    assert_eq!(server.requests().len(), 1);
}

#[rstest]
#[case::not_found(Reply::whole(404, &[], b""), Reason::ImageNotFound)]
#[case::gone(Reply::whole(410, &[], b""), Reason::ImageNotFound)]
#[case::forbidden(Reply::whole(403, &[], b""), Reason::ImageForbidden)]
#[case::login(Reply::whole(401, &[], b""), Reason::ImageForbidden)]
#[case::error(Reply::whole(503, &[], b""), Reason::ImageSourceUnavailable)]
#[case::no_content(Reply::whole(204, &[], b""), Reason::ImageSourceBroken)]
#[case::empty(Reply::whole(200, &[], b""), Reason::ImageSourceBroken)]
#[case::odd_length(Reply::new(200, &[("content-length", "99999999999999999999")], b""), Reason::ImageSourceUnavailable)]
#[case::part_of_it(Reply::whole(206, &[("content-range", "bytes 0-4/400000")], b"12345"), Reason::ImageSourceBroken)]
#[case::encoded(Reply::whole(200, &[("content-encoding", "gzip")], b"12345"), Reason::ImageSourceBroken)]
#[case::unframed(Reply::new(200, &[], b"12345"), Reason::ImageSourceBroken)]
#[case::no_http(Reply::new(200, &[("\0", "")], b""), Reason::ImageSourceUnavailable)]
#[case::silent(Reply::silence(), Reason::ImageSourceUnavailable)]
#[case::announced_too_large(Reply::new(200, &[("content-length", "1048577")], b""), Reason::ImageTooLarge)]
#[case::too_large(Reply::chunked(&[], &[0; 1_048_577]), Reason::ImageTooLarge)]
#[case::redirect_to_nowhere(Reply::whole(302, &[], b""), Reason::ImageSourceBroken)]
#[case::redirect_to_a_file(Reply::redirect("file:///etc/passwd"), Reason::ImageSourceBroken)]
#[case::redirect_with_a_password(Reply::redirect("http://u:p@127.0.0.1/"), Reason::ImageUrlForbidden)]
#[case::redirect_in_a_circle(Reply::redirect("/image"), Reason::ImageSourceBroken)]
#[tokio::test]
async fn an_answer_that_is_no_image_has_its_reason(#[case] reply: Reply, #[case] expected: Reason) {
    let server = Server::scripted([reply]).await;
    assert_eq!(reason(read(&server).await), expected);
}

#[tokio::test]
async fn a_part_that_is_the_whole_is_accepted() {
    let server = Server::scripted([Reply::whole(206, &[("content-range", "bytes 0-4/5")], b"12345")]).await;
    assert_eq!(read(&server).await.unwrap(), b"12345");
}

#[tokio::test]
async fn a_throttling_server_says_when_to_come_back() {
    let server = Server::scripted([Reply::whole(429, &[("retry-after", "17")], b"")]).await;
    let e = open(&server).await.unwrap_err();
    assert_eq!((e.reason(), e.retry_delay()), (Reason::ImageSourceUnavailable, Some(Duration::from_secs(17))));
}

#[tokio::test]
async fn a_redirect_is_followed_with_the_range() {
    let mirror = Server::start({
        let mut first = true;
        move |r: &Request| {
            let reply = file(r, &content(), TAG);
            if std::mem::take(&mut first) { reply.cut(9) } else { reply }
        }
    })
    .await;
    let to = mirror.url_by_name("/moved");
    let server = Server::start(move |_| Reply::redirect(&to)).await;
    assert_eq!(read(&server).await.unwrap(), content());
    assert_eq!(mirror.requests()[1].header("range"), Some("bytes=9-"));
}

#[tokio::test]
async fn a_mirror_without_the_image_is_transient_until_it_was_so_too_often() {
    let mirror = Server::scripted([Reply::whole(404, &[], b"")]).await;
    let to = mirror.url_by_name("/moved");
    let server = Server::start(move |_| Reply::redirect(&to)).await;
    let source = Source::new(QUICK);
    let mut reasons = Vec::new();
    for _ in 0..MIRROR_MISSES {
        reasons.push(reason(source.open(&server.image(ImageFormat::Raw), &policy(), LIMIT).await));
    }
    assert_eq!(reasons[0], Reason::ImageSourceUnavailable);
    assert!(reasons[..4].iter().all(|r| *r == Reason::ImageSourceUnavailable), "{reasons:?}");
    assert_eq!(reasons[4], Reason::ImageNotFound);
}

#[tokio::test]
async fn a_server_that_is_not_there_is_transient() {
    let server = Server::scripted([Reply::whole(200, &[], b"x")]).await;
    let image = server.image(ImageFormat::Raw);
    drop(server);
    // the listener is gone with its task
    tokio::task::yield_now().await;
    let e = Source::new(QUICK).open(&image, &policy(), LIMIT).await.unwrap_err();
    assert_eq!(e.reason(), Reason::ImageSourceUnavailable);
}

#[tokio::test]
async fn a_requested_url_that_leads_to_this_machine_is_refused_before_a_connection() {
    let server = Server::scripted([Reply::whole(200, &[], b"x")]).await;
    let mut image = server.image(ImageFormat::Raw);
    image.trust = UrlTrust::Requested;
    // https, so that it is the address and not the scheme that is refused
    image.url = ImageUrl::parse(&server.url_by_name("/image?token=SENTINEL").replace("http:", "https:")).unwrap();
    assert_eq!(reason(Source::new(QUICK).open(&image, &policy(), LIMIT).await), Reason::ImageUrlForbidden);
    assert!(server.requests().is_empty());
}

#[tokio::test]
async fn a_url_with_a_password_is_refused_whoever_named_it() {
    let server = Server::scripted([Reply::whole(200, &[], b"x")]).await;
    let mut image = server.image(ImageFormat::Raw);
    image.url = ImageUrl::parse("http://user:SENTINEL@127.0.0.1/").unwrap();
    assert_eq!(reason(Source::new(QUICK).open(&image, &policy(), LIMIT).await), Reason::ImageUrlForbidden);
}
