//! What is known of images: the pulls of this daemon and the bases on the hosts.

use futures::{StreamExt, stream};

use super::{Provider, placement};
use crate::config::Host;
use crate::error::{ProviderError, Reason, Result};
use crate::image::{ImageState, ImageStatus};

/// Hosts asked at a time.
const FAN_OUT: usize = 8;

impl Provider {
    /// One row per host that has the image or is getting it.
    pub(super) async fn image_on(&self, entry: &str, host: &str, image: &str) -> Result<Vec<ImageStatus>> {
        let entry = placement::entry(&self.config.current(), entry)?;
        let wanted = placement::image(&entry, image)?;
        let running: Vec<_> = self
            .images
            .statuses()
            .into_iter()
            .filter(|s| s.entry == entry.name && s.key == wanted.key && (host.is_empty() || s.host == host))
            .collect();
        // a running pull is answered without asking the host
        if running.iter().any(|s| s.state == ImageState::Pulling) {
            return Ok(running);
        }
        let (all, mut unreachable) = self.images_of(&entry.name, host).await?;
        let rows: Vec<_> = all.into_iter().filter(|s| s.key == wanted.key).collect();
        match (rows.is_empty(), unreachable.pop()) {
            (false, _) => Ok(rows),
            (true, Some(e)) => Err(e),
            (true, None) => Err(ProviderError::new(
                Reason::ImageNotCached,
                format!("image {} is on no host asked; the first Create that uses it fetches it", placement::quoted(image)),
            )),
        }
    }

    pub(super) async fn images_of(&self, entry: &str, host: &str) -> Result<(Vec<ImageStatus>, Vec<ProviderError>)> {
        let entry = placement::entry(&self.config.current(), entry)?;
        if !host.is_empty() && entry.host(host).is_none() {
            return Err(super::get::host_not_configured(&entry, host));
        }
        let hosts: Vec<Host> = entry.hosts.iter().filter(|h| host.is_empty() || h.name == host).cloned().collect();
        let answers: Vec<_> = stream::iter(hosts)
            .map(|host| {
                let entry = &entry;
                async move {
                    let site = self.sites.open(entry, &host).await.map_err(|e| e.on_host(&host.name))?;
                    self.images.list_on_host(&*site.hv, &site.pool, entry).await.map_err(|e| e.on_host(&host.name))
                }
            })
            .buffered(FAN_OUT)
            .collect()
            .await;
        let mut unreachable = Vec::new();
        // a finished pull is told by its host: its base may have been removed since
        let unfinished = |s: &ImageStatus| s.entry == entry.name && (host.is_empty() || s.host == host) && s.state != ImageState::Ready;
        let mut rows: Vec<ImageStatus> = self.images.statuses().into_iter().filter(unfinished).collect();
        for answer in answers {
            match answer {
                // a pull that this daemon runs knows more than the host's listing
                Ok(listed) => {
                    for row in listed {
                        if !rows.iter().any(|r| r.host == row.host && r.volume.is_some() && r.volume == row.volume) {
                            rows.push(row);
                        }
                    }
                }
                Err(e) => unreachable.push(e),
            }
        }
        rows.sort_by(|a, b| (&a.host, &a.key, &a.volume).cmp(&(&b.host, &b.key, &b.volume)));
        Ok((rows, unreachable))
    }
}
