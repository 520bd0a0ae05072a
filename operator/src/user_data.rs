//! The user-data of a Proxy: from its spec, a Secret or a ConfigMap. Opaque bytes, shown nowhere.

use std::collections::HashMap;
use std::fmt;
use std::sync::Mutex;
use std::time::Duration;

use bytes::Bytes;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::{Api, Client};
use tokio::time::Instant;

use crate::crd::proxy::{CloudInit, KeyRef};

/// How long a value that was read is taken for the present one: thousands of Proxies may name one Secret.
const FRESH: Duration = Duration::from_secs(15);
/// Values that are kept; beyond, the oldest go.
const KEPT: usize = 1024;

/// User-data. `Debug` shows its length.
#[derive(Clone, PartialEq, Eq)]
pub struct UserData(Bytes);

impl fmt::Debug for UserData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UserData({} bytes)", self.0.len())
    }
}

impl UserData {
    /// The bytes.
    #[must_use]
    pub fn bytes(&self) -> &Bytes {
        &self.0
    }
}

/// Why there is no user-data.
#[derive(Debug, thiserror::Error)]
pub enum UserDataError {
    /// What is missing, for the condition.
    #[error("{0}")]
    Missing(String),
    /// The API server could not be asked.
    #[error("the API server cannot be asked for user-data")]
    Api(#[from] kube::Error),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct At {
    namespace: String,
    secret: bool,
    key: (String, String),
}

/// Reads user-data, and remembers it for a moment.
pub struct UserDataSource {
    client: Client,
    read: Mutex<HashMap<At, (Instant, Option<UserData>)>>,
}

impl fmt::Debug for UserDataSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UserDataSource").finish_non_exhaustive()
    }
}

impl UserDataSource {
    /// Reads through `client`.
    #[must_use]
    pub fn new(client: Client) -> Self {
        Self { client, read: Mutex::default() }
    }

    /// The user-data of a Proxy in a namespace; None where its spec gives none.
    ///
    /// # Errors
    /// The object or its key is not there, or the API server does not answer.
    pub async fn of(&self, namespace: &str, cloud_init: Option<&CloudInit>) -> Result<Option<UserData>, UserDataError> {
        let Some(cloud_init) = cloud_init else { return Ok(None) };
        if let Some(inline) = &cloud_init.inline {
            return Ok(Some(UserData(Bytes::copy_from_slice(inline.as_bytes()))));
        }
        let (secret, KeyRef { name, key }) = match (&cloud_init.secret_key_ref, &cloud_init.config_map_key_ref) {
            (Some(at), _) => (true, at),
            (None, Some(at)) => (false, at),
            (None, None) => {
                return Err(UserDataError::Missing("cloudInit names no source: give inline, secretKeyRef or configMapKeyRef".to_owned()));
            }
        };
        let kind = if secret { "Secret" } else { "ConfigMap" };
        let at = At { namespace: namespace.to_owned(), secret, key: (name.clone(), key.clone()) };
        let value = match self.fresh(&at) {
            Some(value) => value,
            None => {
                let value = self.fetch(&at).await?;
                self.keep(at, value.clone());
                value
            }
        };
        value.map(Some).ok_or_else(|| {
            UserDataError::Missing(format!("{kind} {namespace}/{name} with a key {key:?} is not there: make it, or change cloudInit"))
        })
    }

    fn fresh(&self, at: &At) -> Option<Option<UserData>> {
        let read = self.read.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        read.get(at).filter(|(when, _)| when.elapsed() < FRESH).map(|(_, value)| value.clone())
    }

    fn keep(&self, at: At, value: Option<UserData>) {
        let mut read = self.read.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if read.len() >= KEPT {
            read.retain(|_, (when, _)| when.elapsed() < FRESH);
        }
        if read.len() < KEPT {
            read.insert(at, (Instant::now(), value));
        }
    }

    async fn fetch(&self, at: &At) -> Result<Option<UserData>, kube::Error> {
        let (name, key) = &at.key;
        if at.secret {
            let secret = Api::<Secret>::namespaced(self.client.clone(), &at.namespace).get_opt(name).await?;
            return Ok(secret.and_then(|s| s.data).and_then(|mut data| data.remove(key)).map(|value| UserData(value.0.into())));
        }
        let Some(map) = Api::<ConfigMap>::namespaced(self.client.clone(), &at.namespace).get_opt(name).await? else { return Ok(None) };
        let text = map.data.and_then(|mut data| data.remove(key)).map(|value| UserData(value.into()));
        Ok(text.or_else(|| map.binary_data.and_then(|mut data| data.remove(key)).map(|value| UserData(value.0.into()))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_shows_no_byte_of_it() {
        let shown = format!("{:?}", UserData(Bytes::from_static(b"s3nt1nel")));
        assert_eq!(shown, "UserData(8 bytes)");
    }
}
