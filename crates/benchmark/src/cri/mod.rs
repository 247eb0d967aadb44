//! A client of the CRI v1 over a Unix socket. Each call has a deadline and a typed error.

pub mod messages;

use std::collections::HashMap;
use std::time::Duration;

use http::uri::PathAndQuery;
use prost::Message;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};

use messages::*;

/// Why a call did not give an answer.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CallError {
    /// The runtime says that it does not have this call.
    #[error("{call} is not implemented by this runtime: {text}")]
    Unsupported {
        /// The name of the call.
        call: &'static str,
        /// What the runtime says.
        text: String,
    },
    /// The deadline has passed.
    #[error("{call} did not answer within {} s", .limit.as_secs())]
    Deadline {
        /// The name of the call.
        call: &'static str,
        /// How long it was waited for.
        limit: Duration,
    },
    /// Nobody answers at the socket.
    #[error("{call}: nothing answers at the socket: {text}")]
    Gone {
        /// The name of the call.
        call: &'static str,
        /// What went wrong.
        text: String,
    },
    /// The runtime has answered with an error.
    #[error("{call} failed: {text}")]
    Failed {
        /// The name of the call.
        call: &'static str,
        /// What the runtime says.
        text: String,
    },
}

impl CallError {
    fn of(call: &'static str, limit: Duration, status: &Status) -> Self {
        let text = status.message().to_owned();
        match status.code() {
            Code::Unimplemented => Self::Unsupported { call, text },
            Code::DeadlineExceeded | Code::Cancelled => Self::Deadline { call, limit },
            Code::Unavailable => Self::Gone { call, text },
            _ => Self::Failed { call, text },
        }
    }
}

/// A connection to one endpoint.
#[derive(Debug, Clone)]
pub struct Client {
    channel: Channel,
    deadline: Duration,
}

/// The largest answer that is read: lists of a thousand containers are smaller by far.
const LARGEST_ANSWER: usize = 64 << 20;

const RUNTIME: &str = "runtime.v1.RuntimeService";
const IMAGE: &str = "runtime.v1.ImageService";

impl Client {
    /// A client of the socket at `path`. It connects when it is first used, and again when the
    /// connection is lost.
    ///
    /// # Errors
    /// If `path` cannot be written as an address.
    pub fn new(path: &str, deadline: Duration) -> Result<Self, CallError> {
        let path = path.strip_prefix("unix://").unwrap_or(path);
        let endpoint = Endpoint::from_shared(format!("unix://{path}"))
            .map_err(|e| CallError::Gone { call: "connect", text: format!("{path}: {e}") })?;
        Ok(Self { channel: endpoint.connect_lazy(), deadline })
    }

    /// The same connection with another deadline for each call.
    #[must_use]
    pub fn within(&self, deadline: Duration) -> Self {
        Self { channel: self.channel.clone(), deadline }
    }

    async fn call<Q, A>(
        &self,
        service: &str,
        call: &'static str,
        message: Q,
    ) -> Result<A, CallError>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        let limit = self.deadline;
        let path = PathAndQuery::try_from(format!("/{service}/{call}"))
            .map_err(|e| CallError::Failed { call, text: e.to_string() })?;
        let work = async {
            let mut client = tonic::client::Grpc::new(self.channel.clone())
                .max_decoding_message_size(LARGEST_ANSWER);
            client.ready().await.map_err(|e| CallError::Gone { call, text: causes(&e) })?;
            let mut request = Request::new(message);
            // The runtime learns of the deadline as well, and can undo what it has begun.
            request.set_timeout(limit);
            let codec = tonic_prost::ProstCodec::<Q, A>::default();
            client.unary(request, path, codec).await.map_err(|s| CallError::of(call, limit, &s))
        };
        match tokio::time::timeout(limit, work).await {
            Ok(answer) => answer.map(tonic::Response::into_inner),
            Err(_) => Err(CallError::Deadline { call, limit }),
        }
    }

    /// `Version`.
    ///
    /// # Errors
    /// As all calls: see [`CallError`].
    pub async fn version(&self) -> Result<VersionResponse, CallError> {
        self.call(RUNTIME, "Version", VersionRequest { version: "v1".into() }).await
    }

    /// `Status`, with the runtime's own configuration.
    ///
    /// # Errors
    /// If the runtime has no such call, does not answer in time, or refuses.
    pub async fn status(&self) -> Result<StatusResponse, CallError> {
        self.call(RUNTIME, "Status", StatusRequest { verbose: true }).await
    }

    /// `RunPodSandbox`; returns the identifier.
    ///
    /// # Errors
    /// If the runtime has no such call, does not answer in time, or refuses.
    pub async fn run_sandbox(
        &self,
        config: PodSandboxConfig,
        handler: &str,
    ) -> Result<String, CallError> {
        let request =
            RunPodSandboxRequest { config: Some(config), runtime_handler: handler.to_owned() };
        let answer: Id = self.call(RUNTIME, "RunPodSandbox", request).await?;
        Ok(answer.id)
    }

    /// `CreateContainer`; returns the identifier.
    ///
    /// # Errors
    /// If the runtime has no such call, does not answer in time, or refuses.
    pub async fn create(
        &self,
        sandbox: &str,
        config: ContainerConfig,
        sandbox_config: PodSandboxConfig,
    ) -> Result<String, CallError> {
        let request = CreateContainerRequest {
            pod_sandbox_id: sandbox.to_owned(),
            config: Some(config),
            sandbox_config: Some(sandbox_config),
        };
        let answer: Id = self.call(RUNTIME, "CreateContainer", request).await?;
        Ok(answer.id)
    }

    async fn by_id(&self, call: &'static str, id: &str) -> Result<(), CallError> {
        let _: Empty = self.call(RUNTIME, call, Id { id: id.to_owned() }).await?;
        Ok(())
    }

    /// `StartContainer`.
    ///
    /// # Errors
    /// If the runtime has no such call, does not answer in time, or refuses.
    pub async fn start(&self, id: &str) -> Result<(), CallError> {
        self.by_id("StartContainer", id).await
    }

    /// `StopContainer`: SIGTERM, and after `grace` seconds SIGKILL.
    ///
    /// # Errors
    /// If the runtime has no such call, does not answer in time, or refuses.
    pub async fn stop(&self, id: &str, grace: i64) -> Result<(), CallError> {
        let request = StopContainerRequest { container_id: id.to_owned(), timeout: grace };
        let _: Empty = self.call(RUNTIME, "StopContainer", request).await?;
        Ok(())
    }

    /// `RemoveContainer`.
    ///
    /// # Errors
    /// If the runtime has no such call, does not answer in time, or refuses.
    pub async fn remove(&self, id: &str) -> Result<(), CallError> {
        self.by_id("RemoveContainer", id).await
    }

    /// `StopPodSandbox`.
    ///
    /// # Errors
    /// If the runtime has no such call, does not answer in time, or refuses.
    pub async fn stop_sandbox(&self, id: &str) -> Result<(), CallError> {
        self.by_id("StopPodSandbox", id).await
    }

    /// `RemovePodSandbox`.
    ///
    /// # Errors
    /// If the runtime has no such call, does not answer in time, or refuses.
    pub async fn remove_sandbox(&self, id: &str) -> Result<(), CallError> {
        self.by_id("RemovePodSandbox", id).await
    }

    /// The identifiers of the sandboxes that carry a label.
    ///
    /// # Errors
    /// If the runtime has no such call, does not answer in time, or refuses.
    pub async fn sandboxes(&self, label: (&str, &str)) -> Result<Vec<String>, CallError> {
        let sandbox_labels = HashMap::from([(label.0.to_owned(), label.1.to_owned())]);
        let filter = Some(LabelFilter { sandbox_labels, ..LabelFilter::default() });
        let answer: ListResponse =
            self.call(RUNTIME, "ListPodSandbox", ListRequest { filter }).await?;
        Ok(answer.items.into_iter().map(|item| item.id).collect())
    }

    /// The identifiers of the containers that carry a label.
    ///
    /// # Errors
    /// If the runtime has no such call, does not answer in time, or refuses.
    pub async fn containers(&self, label: (&str, &str)) -> Result<Vec<String>, CallError> {
        let container_labels = HashMap::from([(label.0.to_owned(), label.1.to_owned())]);
        let filter = Some(LabelFilter { container_labels, ..LabelFilter::default() });
        let answer: ListResponse =
            self.call(RUNTIME, "ListContainers", ListRequest { filter }).await?;
        Ok(answer.items.into_iter().map(|item| item.id).collect())
    }

    /// `ContainerStatus`.
    ///
    /// # Errors
    /// See [`CallError`]; an answer without a status is [`CallError::Failed`].
    pub async fn container(&self, id: &str) -> Result<ContainerStatus, CallError> {
        let request = StatusOfRequest { id: id.to_owned(), verbose: false };
        let answer: ContainerStatusResponse =
            self.call(RUNTIME, "ContainerStatus", request).await?;
        answer.status.ok_or(CallError::Failed {
            call: "ContainerStatus",
            text: "the answer holds no status".into(),
        })
    }

    /// The address of a sandbox, empty if it has none.
    ///
    /// # Errors
    /// If the runtime has no such call, does not answer in time, or refuses.
    pub async fn address(&self, sandbox: &str) -> Result<String, CallError> {
        let request = StatusOfRequest { id: sandbox.to_owned(), verbose: false };
        let answer: PodSandboxStatusResponse =
            self.call(RUNTIME, "PodSandboxStatus", request).await?;
        Ok(answer.status.and_then(|s| s.network).map(|n| n.ip).unwrap_or_default())
    }

    /// `ExecSync`.
    ///
    /// # Errors
    /// If the runtime has no such call, does not answer in time, or refuses.
    pub async fn exec(&self, id: &str, cmd: &[&str]) -> Result<ExecSyncResponse, CallError> {
        let request = ExecSyncRequest {
            container_id: id.to_owned(),
            cmd: cmd.iter().map(|&word| word.to_owned()).collect(),
            timeout: i64::try_from(self.deadline.as_secs()).unwrap_or(i64::MAX),
        };
        self.call(RUNTIME, "ExecSync", request).await
    }

    /// `UpdateContainerResources`.
    ///
    /// # Errors
    /// If the runtime has no such call, does not answer in time, or refuses.
    pub async fn update(
        &self,
        id: &str,
        resources: LinuxContainerResources,
    ) -> Result<(), CallError> {
        let request =
            UpdateContainerResourcesRequest { container_id: id.to_owned(), linux: Some(resources) };
        let _: Empty = self.call(RUNTIME, "UpdateContainerResources", request).await?;
        Ok(())
    }

    /// `CheckpointContainer`, into an archive at `location`.
    ///
    /// # Errors
    /// If the runtime has no such call, does not answer in time, or refuses.
    pub async fn checkpoint(&self, id: &str, location: &str) -> Result<(), CallError> {
        let request = CheckpointContainerRequest {
            container_id: id.to_owned(),
            location: location.to_owned(),
            timeout: i64::try_from(self.deadline.as_secs()).unwrap_or(i64::MAX),
        };
        let _: Empty = self.call(RUNTIME, "CheckpointContainer", request).await?;
        Ok(())
    }

    /// `PullImage`; returns the reference by which it is known from then on.
    ///
    /// # Errors
    /// If the runtime has no such call, does not answer in time, or refuses.
    pub async fn pull(&self, image: &str) -> Result<String, CallError> {
        let image = Some(ImageSpec { image: image.to_owned() });
        let answer: Id = self.call(IMAGE, "PullImage", ImageRequest { image }).await?;
        Ok(answer.id)
    }

    /// `RemoveImage`.
    ///
    /// # Errors
    /// If the runtime has no such call, does not answer in time, or refuses.
    pub async fn remove_image(&self, image: &str) -> Result<(), CallError> {
        let image = Some(ImageSpec { image: image.to_owned() });
        let _: Empty = self.call(IMAGE, "RemoveImage", ImageRequest { image }).await?;
        Ok(())
    }

    /// The names of all images.
    ///
    /// # Errors
    /// If the runtime has no such call, does not answer in time, or refuses.
    pub async fn images(&self) -> Result<Vec<String>, CallError> {
        let answer: ListImagesResponse = self.call(IMAGE, "ListImages", Empty {}).await?;
        Ok(answer.images.into_iter().flat_map(|image| image.repo_tags).collect())
    }
}

/// An error with its causes, which tonic's own text leaves out.
fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text = format!("{text}: {cause}");
        next = cause.source();
    }
    text
}
