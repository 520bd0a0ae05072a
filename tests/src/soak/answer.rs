//! A call and what came back of it.

use std::future::Future;
use std::time::Duration;

use egress_provider_proto::v1::ErrorReason;
use tonic::{Request, Response, Status};

use crate::refusal::Refusal;

use super::plan::Patience;
use super::reasons::Failure;

/// Longest that a call may take; it only tells what is stuck.
const STUCK_AFTER: Duration = Duration::from_secs(180);

#[derive(Debug)]
pub enum Answer<T> {
    Given(T),
    Refused {
        reason: ErrorReason,
        message: String,
    },
    /// The client gave up, or lost the daemon.
    None(String),
    /// An error that no client of the contract can read.
    Unreadable(String),
    Stuck,
}

impl<T> Answer<T> {
    /// What the summary counts it as; `given` names a success.
    pub fn label(&self, given: impl FnOnce(&T) -> String) -> String {
        match self {
            Self::Given(answer) => given(answer),
            Self::Refused { reason, .. } => reason.wire_name().to_owned(),
            Self::None(_) => "no answer".to_owned(),
            Self::Unreadable(_) => "unreadable".to_owned(),
            Self::Stuck => "stuck".to_owned(),
        }
    }

    pub fn failure(&self) -> Option<(Failure, &str)> {
        match self {
            Self::Given(_) | Self::Stuck => None,
            Self::Refused { reason, message } => Some((Failure::Refused(*reason), message)),
            Self::None(message) => Some((Failure::NoAnswer, message)),
            Self::Unreadable(message) => Some((Failure::Unreadable, message)),
        }
    }
}

/// Makes a call with a caller's patience.
pub async fn ask<Q, T, F>(patience: Patience, request: Q, call: impl FnOnce(Request<Q>) -> F) -> Answer<T>
where
    F: Future<Output = Result<Response<T>, Status>>,
{
    let mut request = Request::new(request);
    let mut limit = STUCK_AFTER;
    match patience {
        Patience::DeadlineMs(ms) => request.set_timeout(Duration::from_millis(ms)),
        Patience::GoneAfterMs(ms) => limit = Duration::from_millis(ms),
        Patience::UntilDone | Patience::NotAtAll => {}
    }
    match tokio::time::timeout(limit, call(request)).await {
        Ok(Ok(response)) => Answer::Given(response.into_inner()),
        Ok(Err(status)) => refusal(&status, patience),
        Err(_) if limit == STUCK_AFTER => Answer::Stuck,
        Err(_) => Answer::None("the caller left".to_owned()),
    }
}

fn refusal<T>(status: &Status, patience: Patience) -> Answer<T> {
    // what the client library says itself, and what a deadline makes of a call, has no details
    let said_by_server = status.metadata().get("content-type").is_some();
    if status.details().is_empty() && (!said_by_server || matches!(patience, Patience::DeadlineMs(_))) {
        return Answer::None(format!("{:?}: {}", status.code(), status.message()));
    }
    match Refusal::read(status) {
        Ok(refusal) => Answer::Refused { reason: refusal.reason, message: refusal.message },
        Err(why) => Answer::Unreadable(why),
    }
}
