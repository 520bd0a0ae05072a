//! url policy
// provisional, until the config part lands: public addresses only
use super::ImageUrl;
use std::net::IpAddr;
#[derive(Debug, Clone, Default, PartialEq)]
pub struct UrlPolicy;
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct UrlRefusal(String);
impl UrlPolicy {
    pub fn check_url(&self, url: &ImageUrl) -> Result<(), UrlRefusal> {
        if url.url().scheme() != "https" {
            return Err(UrlRefusal("only https is allowed".to_owned()));
        }
        Ok(())
    }
    pub fn check_addr(&self, host: &str, ip: IpAddr) -> Result<(), UrlRefusal> {
        if ip.is_loopback() {
            return Err(UrlRefusal(format!("{host} is at {ip}, which is not public")));
        }
        Ok(())
    }
}
