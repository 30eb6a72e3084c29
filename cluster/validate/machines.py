"""Hand-kept facts about clouds: the keys their node configurations have, and what well-known machine types offer."""

from __future__ import annotations

# Keys of `provider` beside those in Ray's schema, as Ray's providers read them (ray/autoscaler/_private).
PROVIDER_KEYS: dict[str, frozenset[str]] = {
    "aws": frozenset(
        {"type", "region", "availability_zone", "cache_stopped_nodes", "use_internal_ips", "use_external_head_ip",
         "security_group", "key_pair", "cloudwatch", "aws_credentials"}
    ),
    "gcp": frozenset(
        {"type", "region", "availability_zone", "project_id", "gcp_credentials", "use_internal_ips",
         "cache_stopped_nodes"}
    ),
    "azure": frozenset(
        {"type", "location", "resource_group", "subscription_id", "availability_zone", "tags", "unique_id",
         "subnet_mask", "msi_name", "msi_resource_group", "use_internal_ips", "use_external_head_ip",
         "cache_stopped_nodes"}
    ),
    "local": frozenset({"type", "head_ip", "worker_ips", "external_head_ip", "coordinator_address"}),
}  # fmt: skip
PROVIDER_REQUIRED: dict[str, tuple[str, ...]] = {
    "aws": ("region",),
    "gcp": ("region", "availability_zone"),
    "azure": ("location", "resource_group"),
    "local": ("head_ip", "worker_ips"),
}

# Parameters of EC2 RunInstances.
_AWS_KEYS = frozenset(
    {"BlockDeviceMappings", "CapacityReservationSpecification", "CpuOptions", "CreditSpecification",
     "DisableApiTermination", "EbsOptimized", "EnclaveOptions", "HibernationOptions", "IamInstanceProfile", "ImageId",
     "InstanceInitiatedShutdownBehavior", "InstanceMarketOptions", "InstanceType", "Ipv6AddressCount",
     "Ipv6Addresses", "KernelId", "KeyName", "LaunchTemplate", "LicenseSpecifications", "MaintenanceOptions",
     "MetadataOptions", "Monitoring", "NetworkInterfaces", "Placement", "PrivateDnsNameOptions", "PrivateIpAddress",
     "RamdiskId", "SecurityGroupIds", "SecurityGroups", "SubnetId", "SubnetIds", "TagSpecifications", "UserData"}
)  # fmt: skip
# Fields of Compute Engine's instance resource.
_GCP_KEYS = frozenset(
    {"advancedMachineFeatures", "canIpForward", "confidentialInstanceConfig", "deletionProtection", "description",
     "disks", "displayDevice", "guestAccelerators", "hostname", "labels", "machineType", "metadata",
     "minCpuPlatform", "networkInterfaces", "networkPerformanceConfig", "params", "reservationAffinity",
     "resourcePolicies", "scheduling", "serviceAccounts", "shieldedInstanceConfig", "sourceMachineImage", "tags",
     "acceleratorConfig", "acceleratorType", "runtimeVersion"}
)  # fmt: skip
# Parameters of Ray's azure-vm-template.json that a cluster file may set.
AZURE_PARAMETERS = frozenset(
    {"adminUsername", "availability_zone", "billingProfile", "enableAcceleratedNetworking", "evictionPolicy", "imageId",
     "imageOffer", "imagePublisher", "imageSku", "imageVersion", "osDiskSize", "priority", "provisionPublicIp",
     "publicKey", "vmSize", "vmTags"}
)  # fmt: skip
NODE_CONFIG_KEYS: dict[str, frozenset[str]] = {
    "aws": _AWS_KEYS,
    "gcp": _GCP_KEYS,
    "azure": frozenset({"azure_arm_parameters", "azure_arm_template"}),
}
MACHINE_TYPE_KEY = {"aws": ("InstanceType",), "gcp": ("machineType",), "azure": ("azure_arm_parameters", "vmSize")}

# (CPUs, GPUs) of machine types, from the providers' lists.
MACHINES: dict[str, tuple[int, int]] = {
    "g6.xlarge": (4, 1), "g6.2xlarge": (8, 1), "g6.4xlarge": (16, 1), "g6.8xlarge": (32, 1), "g6.12xlarge": (48, 4),
    "g6.16xlarge": (64, 1), "g6.24xlarge": (96, 4), "g6.48xlarge": (192, 8), "g6e.xlarge": (4, 1),
    "g6e.12xlarge": (48, 4), "g6e.24xlarge": (96, 4), "g6e.48xlarge": (192, 8), "p4d.24xlarge": (96, 8),
    "p4de.24xlarge": (96, 8), "p5.48xlarge": (192, 8), "p5e.48xlarge": (192, 8), "p5en.48xlarge": (192, 8),
    "m7i.2xlarge": (8, 0), "m7i.4xlarge": (16, 0),
    "a3-highgpu-8g": (208, 8), "a3-megagpu-8g": (208, 8), "a3-ultragpu-8g": (224, 8), "a2-highgpu-8g": (96, 8),
    "n2-standard-8": (8, 0), "n2-standard-16": (16, 0),
    "Standard_ND96isr_H100_v5": (96, 8), "Standard_ND96isr_H200_v5": (96, 8), "Standard_ND96amsr_A100_v4": (96, 8),
    "Standard_D8s_v5": (8, 0), "Standard_D16s_v5": (16, 0),
}  # fmt: skip
