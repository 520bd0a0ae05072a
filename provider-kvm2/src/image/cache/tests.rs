use super::*;
use crate::hypervisor::classify::with_errno;
use crate::hypervisor::memory::{MemoryConnect, MemoryHost};
use crate::hypervisor::{CallFailure, UploadPart};
use crate::image::http::Timing;
use crate::image::http::testing::{QUICK, Reply, Server, file};
use crate::image::tests::{entry, host};
use crate::image::unpack::Packing;
use futures::FutureExt;
use rstest::rstest;
use sha2::{Digest, Sha256};
use tokio::sync::mpsc;

const GIB: u64 = 1 << 30;
const TAG: &str = "\"v1\"";

/// A qcow2 header of 3 GiB and then bytes that are easily told apart.
fn qcow2(length: usize) -> Vec<u8> {
    let mut image = vec![0; 112];
    image[..4].copy_from_slice(b"QFI\xfb");
    image[7] = 3;
    image[23] = 16;
    image[24..32].copy_from_slice(&(3 * GIB).to_be_bytes());
    image[103] = 112;
    image.extend((0u32..).flat_map(u32::to_le_bytes).take(length - 112));
    image
}

fn digest(bytes: &[u8]) -> Sha256Hex {
    Sha256Hex::of(&Sha256::digest(bytes).into())
}

/// One host, and as many caches on it as a test wants.
struct Lab {
    host: Arc<MemoryHost>,
    connect: Arc<MemoryConnect>,
    server: Server,
}

impl Lab {
    async fn serving(server: Server) -> Self {
        let host = MemoryHost::new("hv1");
        Self { connect: MemoryConnect::single("lab", &host), host, server }
    }

    async fn with(content: Vec<u8>) -> Self {
        Self::serving(Server::start(move |r| file(r, &content, TAG)).await).await
    }

    async fn scripted(replies: impl IntoIterator<Item = Reply>) -> Self {
        Self::serving(Server::scripted(replies).await).await
    }

    fn cache(&self) -> Arc<ImageCache> {
        ImageCache::with(self.connect.clone(), Metrics::new(), Source::new(QUICK), Patience::default())
    }

    /// One that does not wait long for others.
    fn impatient(&self) -> Arc<ImageCache> {
        let patience = Patience { poll: Duration::from_millis(1), stall: Duration::from_millis(20) };
        ImageCache::with(self.connect.clone(), Metrics::new(), Source::new(QUICK), patience)
    }

    fn wanted(&self) -> Wanted {
        Wanted { entry: entry(), host: host(), image: self.server.image(ImageFormat::Qcow2) }
    }

    async fn find(&self, cache: &ImageCache, wanted: &Wanted) -> Result<Found> {
        let link = self.host.link();
        let pool = link.lookup_pool("default").await?;
        let volumes = link.list_volumes(&pool).await?;
        self.host.calls();
        cache.find(&*link, &pool, &volumes, wanted).await
    }

    fn volumes(&self) -> Vec<String> {
        self.host.volume_names("default")
    }

    /// Complete bases must hold exactly this; how many there are.
    fn complete_bases(&self, content: &[u8]) -> usize {
        let names = self.volumes();
        let complete: Vec<_> = names.iter().filter_map(|n| n.strip_suffix(bases::MARKER)).collect();
        let mut count = 0;
        for base in complete {
            let marker = self.host.volume_content("default", &format!("{base}{}", bases::MARKER)).unwrap();
            if let Some(marker) = std::str::from_utf8(&marker).ok().and_then(Sha256Hex::parse) {
                assert_eq!(marker, digest(content), "the marker tells the truth");
                assert_eq!(self.host.volume_content("default", base).as_deref(), Some(content), "a base with a marker is whole");
                count += 1;
            }
        }
        count
    }
}

fn base_of(found: Result<Found>) -> Option<Base> {
    match found.expect("the look succeeds") {
        Found::Complete(base) => Some(base),
        Found::Missing => None,
    }
}

/// The reason, after a look that the error keeps the URL's secret.
fn reason(result: Result<Base>) -> Reason {
    let e = result.expect_err("the pull fails");
    assert!(!format!("{e:?} {:?}", e.metadata()).contains("SENTINEL"), "{e:?}");
    e.reason()
}

#[tokio::test]
async fn a_missing_image_is_pulled_once_and_then_found_without_asking_the_host() {
    let content = qcow2(300_000);
    let lab = Lab::with(content.clone()).await;
    let (cache, mut wanted) = (lab.cache(), lab.wanted());
    wanted.image.sha256 = Some(digest(&content));
    assert!(base_of(lab.find(&cache, &wanted).await).is_none());
    let base = cache.pull(wanted.clone()).wait().await.unwrap();
    assert_eq!((base.virtual_size, &base.digest), (3 * GIB, &digest(&content)));
    assert_eq!(base.path, format!("/pools/default/{}", base.volume));
    assert_eq!(lab.complete_bases(&content), 1);
    assert_eq!(base_of(lab.find(&cache, &wanted).await).as_ref(), Some(&base));
    assert!(lab.host.calls().is_empty(), "all was remembered");
    let stranger = lab.cache();
    assert_eq!(base_of(lab.find(&stranger, &wanted).await).as_ref(), Some(&base), "another process reads the same");
    assert_eq!((lab.server.requests().len(), lab.host.crashes(), lab.host.open_streams()), (1, 0, 0));
    let origin = lab.host.volume_content("default", &format!("{}.origin", base.volume)).unwrap();
    assert!(!String::from_utf8_lossy(&origin).contains("SENTINEL"), "the URL's secret stays here");
}

#[tokio::test]
async fn callers_share_one_pull_and_one_that_leaves_does_not_end_it() {
    let content = qcow2(300_000);
    let lab = Lab::with(content.clone()).await;
    let cache = lab.cache();
    let pulls: Vec<_> = (0..5).map(|_| cache.pull(lab.wanted())).collect();
    assert!(pulls[0].wait().now_or_never().is_none(), "a caller looks once and leaves");
    drop(pulls);
    let base = cache.pull(lab.wanted()).wait().await.unwrap();
    assert_eq!(lab.server.requests().len(), 1);
    assert_eq!(lab.complete_bases(&content), 1);
    let status = &cache.statuses()[0];
    assert_eq!((status.state, status.bytes_done, status.bytes_total), (ImageState::Ready, 300_000, Some(300_000)));
    assert_eq!(status.volume.as_deref(), Some(base.volume.as_str()));
}

#[tokio::test]
async fn a_changed_digest_or_url_is_another_base_beside_the_first() {
    let content = qcow2(1000);
    let lab = Lab::with(content.clone()).await;
    let cache = lab.cache();
    let first = cache.pull(lab.wanted()).wait().await.unwrap();
    let mut moved = lab.wanted();
    moved.image.url = ImageUrl::parse(&lab.server.url("/moved")).unwrap();
    assert!(base_of(lab.find(&cache, &moved).await).is_none());
    let second = cache.pull(moved.clone()).wait().await.unwrap();
    assert_ne!(first.volume, second.volume);
    assert_eq!(lab.complete_bases(&content), 2);
    moved.image.sha256 = Some(digest(&content));
    assert_eq!(base_of(lab.find(&cache, &moved).await).map(|b| b.volume), Some(first.volume), "by digest the oldest wins");
}

#[tokio::test]
async fn a_wrong_digest_costs_one_download_and_leaves_nothing() {
    let lab = Lab::with(qcow2(300_000)).await;
    let (cache, mut wanted) = (lab.cache(), lab.wanted());
    lab.host.put_volume("default", "vm.qcow2", b"x");
    wanted.image.sha256 = Some(digest(b"other"));
    assert_eq!(reason(cache.pull(wanted.clone()).wait().await), Reason::DigestMismatch);
    assert_eq!(reason(cache.pull(wanted).wait().await), Reason::DigestMismatch, "answered from memory");
    assert_eq!(lab.server.requests().len(), 1);
    assert_eq!(lab.volumes(), ["vm.qcow2"]);
    assert_eq!(lab.host.open_streams(), 0);
}

#[rstest]
#[case::cut(Reply::whole(200, &[], &qcow2(300_000)).cut(200_000), Reason::ImageSourceBroken)]
#[case::stalled(Reply::whole(200, &[], &qcow2(300_000)).stalled(200_000), Reason::ImageSourceBroken)]
#[case::cut_in_the_head(Reply::whole(200, &[], &qcow2(300_000)).cut(100), Reason::ImageSourceBroken)]
#[case::html(Reply::whole(200, &[("content-type", "text/html; charset=utf-8")], b"<!doctype html><title>Login"), Reason::ImageFormatMismatch)]
#[case::raw(Reply::whole(200, &[], &[0; 4096]), Reason::ImageFormatMismatch)]
#[case::backing_file(Reply::whole(200, &[], &{ let mut q = qcow2(1000); q[15] = 1; q }), Reason::ImageUnsafe)]
#[case::missing(Reply::whole(404, &[], b""), Reason::ImageNotFound)]
#[tokio::test]
async fn a_source_that_fails_leaves_nothing_on_the_host(#[case] reply: Reply, #[case] expected: Reason) {
    let lab = Lab::scripted([reply]).await;
    let cache = lab.cache();
    assert_eq!(reason(cache.pull(lab.wanted()).wait().await), expected);
    assert_eq!(lab.volumes(), Vec::<String>::new());
    assert_eq!((lab.host.open_streams(), lab.host.crashes()), (0, 0));
    let room = lab.host.link().pool_info(&lab.host.link().lookup_pool("default").await.unwrap()).await.unwrap().available;
    assert_eq!(room, 100 * GIB);
}

#[tokio::test]
async fn the_refusal_of_a_page_names_its_content_type() {
    let lab = Lab::scripted([Reply::whole(200, &[("content-type", "text/html")], b"<html>")]).await;
    let e = lab.cache().pull(lab.wanted()).wait().await.unwrap_err();
    assert!(e.message().contains("an HTML page (served as text/html)"), "{e}");
}

#[tokio::test]
async fn a_transient_failure_is_not_remembered() {
    let content = qcow2(1000);
    let lab = Lab::scripted([Reply::whole(503, &[], b""), Reply::whole(200, &[], &content)]).await;
    let cache = lab.cache();
    assert_eq!(reason(cache.pull(lab.wanted()).wait().await), Reason::ImageSourceUnavailable);
    assert_eq!(cache.statuses()[0].state, ImageState::Failed);
    cache.pull(lab.wanted()).wait().await.unwrap();
    assert_eq!(lab.complete_bases(&content), 1);
}

#[tokio::test]
async fn an_image_without_a_length_is_counted_first_and_stored_exactly() {
    let content = qcow2(300_000);
    let lab = Lab::scripted([Reply::chunked(&[], &content)]).await;
    let (cache, mut wanted) = (lab.cache(), lab.wanted());
    let base = cache.pull(wanted.clone()).wait().await.unwrap();
    assert_eq!(lab.complete_bases(&content), 1);
    assert_eq!(lab.host.volume_content("default", &base.volume).map(|c| c.len()), Some(300_000));
    lab.host.calls();
    wanted.image.sha256 = Some(digest(b"other"));
    assert_eq!(reason(cache.pull(wanted).wait().await), Reason::DigestMismatch);
    assert!(!lab.host.calls().contains(&"create_volume"), "a wrong digest shows before anything is made");
}

#[tokio::test]
async fn an_image_that_grew_since_it_was_counted_is_refused_without_an_overrun() {
    let lab = Lab::scripted([Reply::chunked(&[], &qcow2(300_000)), Reply::chunked(&[], &qcow2(300_001))]).await;
    assert_eq!(reason(lab.cache().pull(lab.wanted()).wait().await), Reason::ImageSourceBroken);
    assert_eq!((lab.volumes().len(), lab.host.crashes()), (0, 0));
}

#[tokio::test]
async fn a_raw_image_has_its_length_as_its_size() {
    let lab = Lab::with(vec![7; 8192]).await;
    let mut wanted = lab.wanted();
    wanted.image.format = ImageFormat::Raw;
    let base = lab.cache().pull(wanted).wait().await.unwrap();
    assert_eq!(base.virtual_size, 8192);
    assert!(base.volume.ends_with(".raw"));
}

#[tokio::test]
async fn a_pool_without_room_refuses_before_the_upload_and_with_its_numbers() {
    let lab = Lab::with(qcow2(300_000)).await;
    lab.host.grow_behind_the_back("default", 95 * GIB);
    assert_eq!(reason(lab.cache().pull(lab.wanted()).wait().await), Reason::PoolSpace);
    assert_eq!((lab.volumes().len(), lab.host.crashes()), (0, 0));
}

#[tokio::test]
async fn a_host_error_in_the_stream_is_the_reported_cause_and_leaves_nothing() {
    let lab = Lab::with(qcow2(300_000)).await;
    lab.host
        .fail_next("upload part", CallFailure::Libvirt { code: 38, domain: 18, message: with_errno("cannot write".into(), libc::ENOSPC) });
    assert_eq!(reason(lab.cache().pull(lab.wanted()).wait().await), Reason::PoolSpace);
    assert_eq!(lab.volumes().len(), 0);
}

#[tokio::test]
async fn a_link_lost_in_the_stream_is_cleaned_up_over_another() {
    let lab = Lab::with(qcow2(300_000)).await;
    lab.host.fail_next("upload part", CallFailure::LinkDead { cause: "cut".into() });
    assert_eq!(reason(lab.cache().pull(lab.wanted()).wait().await), Reason::LinkLost);
    assert_eq!(lab.volumes().len(), 0);
}

#[rstest]
#[case("refresh_pool", 1)]
#[case("volume_info", 0)]
#[case("create_volume", 1)]
#[tokio::test]
async fn a_link_lost_while_finishing_does_not_cost_the_download(#[case] call: &'static str, #[case] earlier: usize) {
    let content = qcow2(300_000);
    let lab = Lab::with(content.clone()).await;
    // calls of this name before the finishing succeed
    lab.host.fail_after(call, earlier, CallFailure::LinkDead { cause: "cut".into() });
    lab.cache().pull(lab.wanted()).wait().await.unwrap();
    assert_eq!(lab.complete_bases(&content), 1);
    assert_eq!(lab.server.requests().len(), 1);
}

#[tokio::test]
async fn a_volume_that_libvirt_sees_otherwise_gets_no_marker() {
    let lab = Lab::with(qcow2(300_000)).await;
    lab.host.fail_after("volume_info", 0, CallFailure::Libvirt { code: 38, domain: 18, message: "cannot open".into() });
    reason(lab.cache().pull(lab.wanted()).wait().await);
    assert_eq!(lab.volumes().len(), 0);
}

#[tokio::test]
async fn a_name_that_is_taken_after_all_is_left_to_its_owner() {
    let lab = Lab::with(qcow2(300_000)).await;
    lab.host.put_volume("default", "vm.qcow2", b"x");
    lab.host.fail_next("create_volume", CallFailure::Libvirt { code: code::STORAGE_VOL_EXIST, domain: 18, message: "in use".into() });
    reason(lab.cache().pull(lab.wanted()).wait().await);
    assert!(!lab.host.calls().contains(&"delete_volume"));
}

#[tokio::test]
async fn killed_at_any_step_no_base_is_partial_and_the_next_process_gets_one() {
    let content = qcow2(40_000);
    let steps = {
        let lab = Lab::with(content.clone()).await;
        lab.cache().pull(lab.wanted()).wait().await.unwrap();
        lab.host.steps()
    };
    assert!(steps > 10, "{steps}");
    // how many pieces the image comes in varies a little
    for step in 0..=steps + 2 {
        let lab = Lab::with(content.clone()).await;
        let killed = lab.cache();
        lab.host.freeze_at(step);
        let pull = killed.pull(lab.wanted());
        tokio::select! {
            _ = pull.wait() => assert!(step >= steps, "it ended before step {step}"),
            () = lab.host.frozen() => {}
        }
        kill(&killed);
        lab.host.thaw();
        let complete = lab.complete_bases(&content);
        let next = lab.impatient();
        let base = match base_of(lab.find(&next, &lab.wanted()).await) {
            Some(base) => base,
            None => next.pull(lab.wanted()).wait().await.unwrap(),
        };
        assert_eq!(lab.host.volume_content("default", &base.volume).as_deref(), Some(&*content), "killed at step {step}");
        assert_eq!(lab.complete_bases(&content), 1, "killed at step {step} with {complete} complete");
        assert_eq!(lab.host.crashes(), 0);
    }
}

/// Looks at the pool, then space, whether an empty pool may be empty, and volume; the next step is the upload.
const STEPS_TO_THE_STREAM: u64 = 9;

/// What a killed process cleans up: nothing.
fn kill(cache: &ImageCache) {
    lock(&cache.pulls).values().for_each(|running| running.task.abort());
}

#[tokio::test]
async fn another_processs_upload_is_waited_for_and_then_used() {
    let content = qcow2(300_000);
    let lab = Lab::with(content.clone()).await;
    let (slow, waiting) = (lab.cache(), lab.cache());
    // the first process has made its volume; from here on the test plays its part
    lab.host.freeze_at(STEPS_TO_THE_STREAM);
    slow.pull(lab.wanted());
    lab.host.frozen().await;
    kill(&slow);
    lab.host.thaw();
    assert_eq!(lab.volumes().len(), 1, "{:?}", lab.volumes());
    let volume = lab.volumes()[0].clone();
    tokio::time::pause();
    let second = waiting.pull(lab.wanted());
    for _ in 0..100 {
        lab.host.touch_volume("default", &volume, Duration::ZERO);
        assert!(tokio::time::timeout(Duration::from_secs(10), second.wait()).await.is_err(), "it moves, so it is waited for");
    }
    assert_eq!(second.status().state, ImageState::PulledElsewhere);
    // it ends
    finish(&lab, &volume, &content).await;
    assert_eq!(second.wait().await.unwrap().volume, volume);
    assert_eq!(lab.complete_bases(&content), 1);
}

/// What the other process would have done.
async fn finish(lab: &Lab, volume: &str, content: &[u8]) {
    let link = lab.host.link();
    let pool = link.lookup_pool("default").await.unwrap();
    let base = link.lookup_volume(&pool, volume).await.unwrap();
    let (parts, queue) = mpsc::channel(2);
    parts.send(UploadPart::Data(content.to_vec().into())).await.unwrap();
    parts.send(UploadPart::Finish).await.unwrap();
    link.upload(&base, content.len() as u64, queue, Duration::from_secs(1)).await.unwrap();
    let image = lab.wanted().image;
    let origin = Origin {
        entry: "lab".into(),
        key: image.key,
        url: image.url.redacted(),
        url_sha256: url_sha256(&image.url),
        etag: None,
        length: content.len() as u64,
        virtual_size: 3 * GIB,
        format: "qcow2".into(),
        time: jiff::Timestamp::now(),
        stored_sha256: digest(content).to_string(),
    };
    lab.host.put_volume("default", &format!("{volume}.origin"), &origin.to_json());
    lab.host.put_volume("default", &format!("{volume}.sha256"), digest(content).as_str().as_bytes());
}

#[tokio::test]
async fn an_upload_that_stands_still_is_left_alone_and_the_image_stored_again() {
    let content = qcow2(300_000);
    let lab = Lab::with(content.clone()).await;
    lab.host.put_volume("default", "base-lab-debian-00000001.qcow2", b"half");
    let cache = lab.impatient();
    let base = cache.pull(lab.wanted()).wait().await.unwrap();
    assert!(lab.host.calls().iter().filter(|c| **c == "volume_xml").count() > 1, "it was watched");
    assert_ne!(base.volume, "base-lab-debian-00000001.qcow2");
    assert_eq!(lab.host.volume_content("default", "base-lab-debian-00000001.qcow2").as_deref(), Some(&b"half"[..]));
    assert_eq!(lab.complete_bases(&content), 1);
}

#[tokio::test]
async fn what_this_daemon_was_killed_at_is_not_waited_for() {
    let content = qcow2(300_000);
    let lab = Lab::with(content.clone()).await;
    let first = ImageCache::of_replica(lab.connect.clone(), Metrics::new(), "host-1");
    lab.host.freeze_at(STEPS_TO_THE_STREAM);
    first.pull(lab.wanted());
    lab.host.frozen().await;
    kill(&first);
    lab.host.thaw();
    assert_eq!(lab.volumes().len(), 1, "debris: {:?}", lab.volumes());
    lab.host.calls();
    let restarted = ImageCache::of_replica(lab.connect.clone(), Metrics::new(), "host-1");
    restarted.pull(lab.wanted()).wait().await.unwrap();
    assert_eq!(lab.host.calls().iter().filter(|c| **c == "volume_xml").count(), 0, "nothing was watched");
    assert_eq!(lab.complete_bases(&content), 1);
}

#[tokio::test]
async fn a_base_whose_marker_was_never_filled_is_incomplete_and_not_waited_for_by_who_made_it() {
    let content = qcow2(300_000);
    let lab = Lab::with(content.clone()).await;
    let first = ImageCache::of_replica(lab.connect.clone(), Metrics::new(), "host-1");
    let base = first.pull(lab.wanted()).wait().await.unwrap().volume;
    lab.host.put_volume("default", &format!("{base}.sha256"), &[0; 64]);
    lab.host.calls();
    let restarted = ImageCache::of_replica(lab.connect.clone(), Metrics::new(), "host-1");
    let id = HostId { entry: "lab".into(), host: "hv1".into() };
    let hv = lab.connect.control(&id).await.unwrap();
    let volumes = hv.list_volumes(&hv.lookup_pool("default").await.unwrap()).await.unwrap();
    let incomplete = restarted.incomplete(&*hv, &id, &volumes, "lab").await.unwrap();
    assert_eq!(incomplete.iter().map(|v| v.name.as_str()).collect::<Vec<_>>(), [base.as_str()]);
    let second = restarted.pull(lab.wanted()).wait().await.unwrap().volume;
    assert_ne!(second, base);
    assert_eq!(lab.host.calls().iter().filter(|c| **c == "volume_xml").count(), 0, "nothing was watched");
    let volumes = hv.list_volumes(&hv.lookup_pool("default").await.unwrap()).await.unwrap();
    let incomplete = restarted.incomplete(&*hv, &id, &volumes, "lab").await.unwrap();
    assert_eq!(incomplete.iter().map(|v| v.name.as_str()).collect::<Vec<_>>(), [base.as_str()], "the second is complete");
}

#[tokio::test]
async fn old_debris_is_not_waited_for() {
    let lab = Lab::with(qcow2(1000)).await;
    lab.host.put_volume("default", "base-lab-debian-00000001.qcow2", b"half");
    lab.host.touch_volume("default", "base-lab-debian-00000001.qcow2", SURELY_OLD * 2);
    lab.cache().pull(lab.wanted()).wait().await.unwrap();
    assert_eq!(lab.host.calls().iter().filter(|c| **c == "volume_xml").count(), 1, "one look was enough");
}

#[tokio::test]
async fn two_processes_that_meet_on_a_cold_cache_both_get_a_whole_base() {
    let content = qcow2(300_000);
    let lab = Lab::with(content.clone()).await;
    let (a, b) = (lab.cache(), lab.cache());
    let (one, two) = (a.pull(lab.wanted()), b.pull(lab.wanted()));
    let (one, two) = tokio::join!(one.wait(), two.wait());
    let (one, two) = (one.unwrap(), two.unwrap());
    assert_eq!(lab.complete_bases(&content), 2);
    let third = lab.cache();
    let agreed = base_of(lab.find(&third, &lab.wanted()).await).unwrap().volume;
    assert!(agreed == one.volume || agreed == two.volume);
}

#[tokio::test]
async fn the_predecessors_base_is_used_and_read_anew_each_time() {
    let content = qcow2(1000);
    let lab = Lab::with(content.clone()).await;
    lab.host.put_volume("default", "base-lab-debian.qcow2", &content);
    let (cache, mut wanted) = (lab.cache(), lab.wanted());
    assert!(base_of(lab.find(&cache, &wanted).await).is_none(), "without its marker it is not complete");
    lab.host.put_volume("default", "base-lab-debian.qcow2.sha256", digest(&content).as_str().as_bytes());
    let base = base_of(lab.find(&cache, &wanted).await).expect("it is used");
    assert_eq!((base.volume.as_str(), base.virtual_size), ("base-lab-debian.qcow2", 3 * GIB));
    let other = digest(b"replaced by the predecessor");
    lab.host.put_volume("default", "base-lab-debian.qcow2.sha256", other.as_str().as_bytes());
    wanted.image.sha256 = Some(digest(&content));
    assert!(base_of(lab.find(&cache, &wanted).await).is_none());
}

#[tokio::test]
async fn a_base_that_was_removed_is_not_found_again() {
    let lab = Lab::with(qcow2(1000)).await;
    let cache = lab.cache();
    let base = cache.pull(lab.wanted()).wait().await.unwrap();
    lab.host.remove_volume("default", &base.volume);
    assert!(base_of(lab.find(&cache, &lab.wanted()).await).is_none());
    assert!(lock(&cache.facts).is_empty());
    let second = cache.pull(lab.wanted()).wait().await.unwrap();
    assert_ne!(base.volume, second.volume);
}

#[tokio::test]
async fn a_listing_shows_complete_bases_of_the_entry_only() {
    let content = qcow2(1000);
    let lab = Lab::with(content.clone()).await;
    let cache = lab.cache();
    let base = cache.pull(lab.wanted()).wait().await.unwrap();
    lab.host.put_volume("default", "base-lab-debian-00000001.qcow2", b"half");
    lab.host.put_volume("default", "base-lab-x-00000001.qcow2", b"x");
    lab.host.put_volume("default", "base-lab-x-00000001.qcow2.origin", b"{}");
    lab.host.put_volume("default", "base-lab-x-00000001.qcow2.sha256", digest(b"x").as_str().as_bytes());
    let link = lab.host.link();
    let pool = link.lookup_pool("default").await.unwrap();
    let list = cache.list_on_host(&*link, &pool, &entry()).await.unwrap();
    assert_eq!(list.len(), 1);
    assert_eq!((list[0].key.as_str(), list[0].volume.as_deref()), ("debian", Some(base.volume.as_str())));
    assert_eq!((list[0].state, list[0].virtual_size), (ImageState::Ready, Some(3 * GIB)));
    assert!(!list[0].url.as_secret_str().contains("SENTINEL"));
}

#[tokio::test]
async fn a_shutdown_ends_a_pull_and_removes_what_it_made() {
    let lab = Lab::scripted([Reply::whole(200, &[], &qcow2(300_000)).stalled(200_000)]).await;
    let cache = ImageCache::new(lab.connect.clone(), Metrics::new());
    let pull = cache.pull(lab.wanted());
    while pull.status().bytes_done < 200_000 {
        tokio::task::yield_now().await;
    }
    cache.shutdown().await;
    assert_eq!(reason(pull.wait().await), Reason::ShuttingDown);
    assert_eq!((lab.volumes().len(), lab.host.open_streams()), (0, 0));
    assert_eq!(reason(cache.pull(lab.wanted()).wait().await), Reason::ShuttingDown, "nothing begins after a shutdown");
}

/// What breaks an upload.
#[derive(Debug, Clone, Copy)]
enum Breakage {
    SourceCut,
    SourceSilent,
    WrongDigest,
    NotAnImage,
    HostRefusesAPart,
    LinkLost,
    NoRoom,
    VolumeGone,
}

#[rstest]
#[case(Breakage::SourceCut)]
#[case(Breakage::SourceSilent)]
#[case(Breakage::WrongDigest)]
#[case(Breakage::NotAnImage)]
#[case(Breakage::HostRefusesAPart)]
#[case(Breakage::LinkLost)]
#[case(Breakage::NoRoom)]
#[case(Breakage::VolumeGone)]
#[tokio::test]
async fn two_hundred_failed_uploads_leave_no_volume_stream_task_or_space(#[case] breakage: Breakage) {
    let whole = Reply::whole(200, &[], &qcow2(30_000));
    let reply = match breakage {
        Breakage::SourceCut => whole.cut(20_000),
        Breakage::SourceSilent => whole.stalled(20_000),
        Breakage::NotAnImage => Reply::whole(200, &[], &[0; 4096]),
        _ => whole,
    };
    let lab = Lab::scripted([reply]).await;
    let timing = Timing { stall: Duration::from_millis(5), tries: 1, ..QUICK };
    let timing = if matches!(breakage, Breakage::SourceSilent) { timing } else { QUICK };
    let cache = ImageCache::with(lab.connect.clone(), Metrics::new(), Source::new(timing), Patience::default());
    for n in 0..200u32 {
        let mut wanted = lab.wanted();
        match breakage {
            // one that was found wrong is answered from memory
            Breakage::WrongDigest => wanted.image.sha256 = Some(digest(&n.to_be_bytes())),
            Breakage::HostRefusesAPart => {
                let failure = CallFailure::Libvirt { code: 38, domain: 18, message: "cannot write".into() };
                lab.host.fail_next("upload part", failure);
            }
            Breakage::LinkLost => lab.host.fail_next("upload part", CallFailure::LinkDead { cause: "cut".into() }),
            Breakage::NoRoom => wanted.host.pool = "full".into(),
            Breakage::VolumeGone => {
                let gone = CallFailure::Libvirt { code: code::NO_STORAGE_VOL, domain: 18, message: "no such volume".into() };
                lab.host.fail_next("upload", gone);
            }
            Breakage::SourceCut | Breakage::SourceSilent | Breakage::NotAnImage => {}
        }
        if n == 0 {
            lab.host.add_pool("full", 1 << 10);
        }
        reason(cache.pull(wanted).wait().await);
    }
    assert_eq!((lab.volumes(), lab.host.volume_names("full")), (Vec::new(), Vec::new()));
    assert_eq!((lab.host.open_streams(), lab.host.crashes()), (0, 0));
    let link = lab.host.link();
    let pool = link.lookup_pool("default").await.unwrap();
    assert_eq!(link.pool_info(&pool).await.unwrap().available, 100 * GIB);
    cache.shutdown().await;
    assert_eq!(cache.tasks.len(), 0);
}

fn packed(how: Packing, content: &[u8]) -> Vec<u8> {
    use std::io::Write;
    match how {
        Packing::Gzip => {
            let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            out.write_all(content).unwrap();
            out.finish().unwrap()
        }
        Packing::Xz => {
            let mut out = liblzma::write::XzEncoder::new(Vec::new(), 1);
            out.write_all(content).unwrap();
            out.finish().unwrap()
        }
        Packing::Zstd => {
            // with the checksum that the command line tool adds
            let mut out = zstd::Encoder::new(Vec::new(), 1).unwrap();
            out.include_checksum(true).unwrap();
            out.write_all(content).unwrap();
            out.finish().unwrap()
        }
    }
}

#[rstest]
#[case(Packing::Gzip)]
#[case(Packing::Xz)]
#[case(Packing::Zstd)]
#[tokio::test]
async fn a_packed_image_is_stored_unpacked_under_the_digest_of_the_file(#[case] how: Packing) {
    let content = qcow2(1_000_000);
    let file_content = packed(how, &content);
    let lab = Lab::with(file_content.clone()).await;
    let (cache, mut wanted) = (lab.cache(), lab.wanted());
    wanted.image.sha256 = Some(digest(&file_content));
    let base = cache.pull(wanted.clone()).wait().await.unwrap();
    assert_eq!(lab.host.volume_content("default", &base.volume), Some(content.clone()));
    assert_eq!((base.virtual_size, &base.digest), (3 * GIB, &digest(&file_content)));
    let origin = lab.host.volume_content("default", &format!("{}.origin", base.volume)).unwrap();
    assert_eq!(Origin::parse(&origin).unwrap().stored_sha256, digest(&content).to_string());
    assert_eq!(base_of(lab.find(&lab.cache(), &wanted).await), Some(base));
    wanted.image.sha256 = Some(digest(&content));
    assert_eq!(reason(cache.pull(wanted).wait().await), Reason::DigestMismatch, "the digest is that of the file");
}

#[rstest]
#[case(Packing::Gzip)]
#[case(Packing::Xz)]
#[case(Packing::Zstd)]
#[tokio::test]
async fn a_packed_image_that_is_broken_has_the_right_cause_and_leaves_nothing(#[case] how: Packing) {
    let whole = packed(how, &qcow2(1_000_000));
    let half = whole.len() / 2;
    let lab = Lab::scripted([Reply::whole(200, &[], &whole).cut(half)]).await;
    assert_eq!(reason(lab.cache().pull(lab.wanted()).wait().await), Reason::ImageSourceBroken, "the server broke off");
    let lab = Lab::scripted([Reply::whole(200, &[], &whole[..half])]).await;
    assert_eq!(reason(lab.cache().pull(lab.wanted()).wait().await), Reason::ImageFormatMismatch, "the file itself is cut");
    let mut bent = whole;
    bent[half..half + 64].fill(0);
    let lab = Lab::scripted([Reply::whole(200, &[], &bent)]).await;
    let result = lab.cache().pull(lab.wanted()).wait().await;
    assert_eq!(reason(result), Reason::ImageFormatMismatch);
    assert_eq!(lab.volumes().len(), 0);
}

#[rstest]
#[case(Packing::Gzip)]
#[case(Packing::Xz)]
#[case(Packing::Zstd)]
#[tokio::test]
async fn a_small_file_that_unpacks_to_too_much_is_refused(#[case] how: Packing) {
    let bomb = packed(how, &vec![0; (4 << 20) + 1]);
    assert!(bomb.len() < 1 << 17);
    let lab = Lab::with(bomb).await;
    let mut wanted = lab.wanted();
    wanted.image.format = ImageFormat::Raw;
    assert_eq!(reason(lab.cache().pull(wanted).wait().await), Reason::ImageTooLarge);
    assert_eq!(lab.volumes().len(), 0);
}

#[tokio::test]
async fn an_image_that_is_packed_twice_is_refused() {
    let lab = Lab::with(packed(Packing::Gzip, &packed(Packing::Zstd, &qcow2(1000)))).await;
    let e = lab.cache().pull(lab.wanted()).wait().await.unwrap_err();
    assert!(e.message().contains("zstd-compressed"), "{e}");
    assert_eq!(e.reason(), Reason::ImageFormatMismatch);
}
