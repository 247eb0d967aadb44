//! A client of the CRI v1 over a Unix socket. Each call has a deadline and a typed error.

use std::collections::HashMap;
use std::time::Duration;

use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Response, Status};

pub use k8s_cri::v1;
use k8s_cri::v1::image_service_client::ImageServiceClient;
use k8s_cri::v1::runtime_service_client::RuntimeServiceClient;
use k8s_cri::v1::*;

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

    fn runtime(&self) -> RuntimeServiceClient<Channel> {
        RuntimeServiceClient::new(self.channel.clone()).max_decoding_message_size(LARGEST_ANSWER)
    }

    fn store(&self) -> ImageServiceClient<Channel> {
        ImageServiceClient::new(self.channel.clone()).max_decoding_message_size(LARGEST_ANSWER)
    }

    /// A request. The runtime learns of the deadline as well, and can undo what it has begun.
    fn request<Q>(&self, message: Q) -> Request<Q> {
        let mut request = Request::new(message);
        request.set_timeout(self.deadline);
        request
    }

    async fn answer<A>(
        &self,
        call: &'static str,
        work: impl Future<Output = Result<Response<A>, Status>>,
    ) -> Result<A, CallError> {
        let limit = self.deadline;
        match tokio::time::timeout(limit, work).await {
            Ok(answer) => answer
                .map(Response::into_inner)
                .map_err(|status| CallError::of(call, limit, &status)),
            Err(_) => Err(CallError::Deadline { call, limit }),
        }
    }

    /// `Version`.
    ///
    /// # Errors
    /// As all calls: see [`CallError`].
    pub async fn version(&self) -> Result<VersionResponse, CallError> {
        let request = self.request(VersionRequest { version: "v1".into() });
        self.answer("Version", self.runtime().version(request)).await
    }

    /// `Status`, with the runtime's own configuration.
    ///
    /// # Errors
    /// If the runtime has no such call, does not answer in time, or refuses.
    pub async fn status(&self) -> Result<StatusResponse, CallError> {
        let request = self.request(StatusRequest { verbose: true });
        self.answer("Status", self.runtime().status(request)).await
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
        let request = self.request(request);
        let answer = self.answer("RunPodSandbox", self.runtime().run_pod_sandbox(request)).await?;
        Ok(answer.pod_sandbox_id)
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
        let request = self.request(CreateContainerRequest {
            pod_sandbox_id: sandbox.to_owned(),
            config: Some(config),
            sandbox_config: Some(sandbox_config),
        });
        let answer =
            self.answer("CreateContainer", self.runtime().create_container(request)).await?;
        Ok(answer.container_id)
    }

    /// `StartContainer`.
    ///
    /// # Errors
    /// If the runtime has no such call, does not answer in time, or refuses.
    pub async fn start(&self, id: &str) -> Result<(), CallError> {
        let request = self.request(StartContainerRequest { container_id: id.to_owned() });
        self.answer("StartContainer", self.runtime().start_container(request)).await?;
        Ok(())
    }

    /// `StopContainer`: SIGTERM, and after `grace` seconds SIGKILL.
    ///
    /// # Errors
    /// If the runtime has no such call, does not answer in time, or refuses.
    pub async fn stop(&self, id: &str, grace: i64) -> Result<(), CallError> {
        let request = StopContainerRequest { container_id: id.to_owned(), timeout: grace };
        let request = self.request(request);
        self.answer("StopContainer", self.runtime().stop_container(request)).await?;
        Ok(())
    }

    /// `RemoveContainer`.
    ///
    /// # Errors
    /// If the runtime has no such call, does not answer in time, or refuses.
    pub async fn remove(&self, id: &str) -> Result<(), CallError> {
        let request = self.request(RemoveContainerRequest { container_id: id.to_owned() });
        self.answer("RemoveContainer", self.runtime().remove_container(request)).await?;
        Ok(())
    }

    /// `StopPodSandbox`.
    ///
    /// # Errors
    /// If the runtime has no such call, does not answer in time, or refuses.
    pub async fn stop_sandbox(&self, id: &str) -> Result<(), CallError> {
        let request = self.request(StopPodSandboxRequest { pod_sandbox_id: id.to_owned() });
        self.answer("StopPodSandbox", self.runtime().stop_pod_sandbox(request)).await?;
        Ok(())
    }

    /// `RemovePodSandbox`.
    ///
    /// # Errors
    /// If the runtime has no such call, does not answer in time, or refuses.
    pub async fn remove_sandbox(&self, id: &str) -> Result<(), CallError> {
        let request = self.request(RemovePodSandboxRequest { pod_sandbox_id: id.to_owned() });
        self.answer("RemovePodSandbox", self.runtime().remove_pod_sandbox(request)).await?;
        Ok(())
    }

    /// The identifiers of the sandboxes that carry a label.
    ///
    /// # Errors
    /// If the runtime has no such call, does not answer in time, or refuses.
    pub async fn sandboxes(&self, label: (&str, &str)) -> Result<Vec<String>, CallError> {
        let filter = PodSandboxFilter { label_selector: labelled(label), ..Default::default() };
        let request = self.request(ListPodSandboxRequest { filter: Some(filter) });
        let answer =
            self.answer("ListPodSandbox", self.runtime().list_pod_sandbox(request)).await?;
        Ok(answer.items.into_iter().map(|item| item.id).collect())
    }

    /// The identifiers of the containers that carry a label.
    ///
    /// # Errors
    /// If the runtime has no such call, does not answer in time, or refuses.
    pub async fn containers(&self, label: (&str, &str)) -> Result<Vec<String>, CallError> {
        let filter = ContainerFilter { label_selector: labelled(label), ..Default::default() };
        let request = self.request(ListContainersRequest { filter: Some(filter) });
        let answer = self.answer("ListContainers", self.runtime().list_containers(request)).await?;
        Ok(answer.containers.into_iter().map(|item| item.id).collect())
    }

    /// `ContainerStatus`.
    ///
    /// # Errors
    /// See [`CallError`]; an answer without a status is [`CallError::Failed`].
    pub async fn container(&self, id: &str) -> Result<ContainerStatus, CallError> {
        let request = ContainerStatusRequest { container_id: id.to_owned(), verbose: false };
        let request = self.request(request);
        let answer =
            self.answer("ContainerStatus", self.runtime().container_status(request)).await?;
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
        let request =
            PodSandboxStatusRequest { pod_sandbox_id: sandbox.to_owned(), verbose: false };
        let request = self.request(request);
        let answer =
            self.answer("PodSandboxStatus", self.runtime().pod_sandbox_status(request)).await?;
        Ok(answer.status.and_then(|s| s.network).map(|n| n.ip).unwrap_or_default())
    }

    /// `ExecSync`.
    ///
    /// # Errors
    /// If the runtime has no such call, does not answer in time, or refuses.
    pub async fn exec(&self, id: &str, cmd: &[&str]) -> Result<ExecSyncResponse, CallError> {
        let request = self.request(ExecSyncRequest {
            container_id: id.to_owned(),
            cmd: cmd.iter().map(|&word| word.to_owned()).collect(),
            timeout: i64::try_from(self.deadline.as_secs()).unwrap_or(i64::MAX),
        });
        self.answer("ExecSync", self.runtime().exec_sync(request)).await
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
        let request = self.request(UpdateContainerResourcesRequest {
            container_id: id.to_owned(),
            linux: Some(resources),
            ..Default::default()
        });
        let mut runtime = self.runtime();
        self.answer("UpdateContainerResources", runtime.update_container_resources(request))
            .await?;
        Ok(())
    }

    /// `CheckpointContainer`, into an archive at `location`.
    ///
    /// # Errors
    /// If the runtime has no such call, does not answer in time, or refuses.
    pub async fn checkpoint(&self, id: &str, location: &str) -> Result<(), CallError> {
        let request = self.request(CheckpointContainerRequest {
            container_id: id.to_owned(),
            location: location.to_owned(),
            timeout: i64::try_from(self.deadline.as_secs()).unwrap_or(i64::MAX),
        });
        self.answer("CheckpointContainer", self.runtime().checkpoint_container(request)).await?;
        Ok(())
    }

    /// `PullImage`; returns the reference by which it is known from then on.
    ///
    /// # Errors
    /// If the runtime has no such call, does not answer in time, or refuses.
    pub async fn pull(&self, image: &str) -> Result<String, CallError> {
        let request = PullImageRequest { image: Some(image_spec(image)), ..Default::default() };
        let request = self.request(request);
        let answer = self.answer("PullImage", self.store().pull_image(request)).await?;
        Ok(answer.image_ref)
    }

    /// `RemoveImage`.
    ///
    /// # Errors
    /// If the runtime has no such call, does not answer in time, or refuses.
    pub(crate) async fn remove_image(&self, image: &str) -> Result<(), CallError> {
        let request = self.request(RemoveImageRequest { image: Some(image_spec(image)) });
        self.answer("RemoveImage", self.store().remove_image(request)).await?;
        Ok(())
    }

    /// The names of all images.
    ///
    /// # Errors
    /// If the runtime has no such call, does not answer in time, or refuses.
    pub async fn images(&self) -> Result<Vec<String>, CallError> {
        let request = self.request(ListImagesRequest::default());
        let answer = self.answer("ListImages", self.store().list_images(request)).await?;
        Ok(answer.images.into_iter().flat_map(|image| image.repo_tags).collect())
    }
}

/// An image by its name.
#[must_use]
pub fn image_spec(image: impl Into<String>) -> ImageSpec {
    ImageSpec { image: image.into(), ..Default::default() }
}

fn labelled((key, value): (&str, &str)) -> HashMap<String, String> {
    HashMap::from([(key.to_owned(), value.to_owned())])
}
