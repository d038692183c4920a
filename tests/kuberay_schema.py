"""The part of KubeRay's custom resources (ray.io/v1, KubeRay 1.5.1) that our manifests use, as a JSON schema.

Written for these tests from KubeRay's reference of its fields. It knows less than the operator and is stricter: a field
that our manifests do not use is an error here, which is where a misspelt one shows.
"""

from typing import Any

TEXT = {"type": "string", "minLength": 1}
COUNT = {"type": "integer", "minimum": 0}
FLAG = {"type": "boolean"}
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
QUANTITIES = {"type": "object", "additionalProperties": {"type": "string", "pattern": r"^\d+(\.\d+)?(m|Ki|Mi|Gi|Ti)?$"}}


def record(required: str = "", **fields: Any) -> dict[str, Any]:
    """An object of these fields and no other."""
    return {"type": "object", "properties": fields, "required": required.split(), "additionalProperties": False}


def items(schema: dict[str, Any], least: int = 1) -> dict[str, Any]:
    """A list."""
    return {"type": "array", "items": schema, "minItems": least}


_SECRET_KEY = record("secretKeyRef", secretKeyRef=record("name key", name=TEXT, key=TEXT, optional=FLAG))
_VARIABLE = record("name", name=TEXT, value={"type": "string"}, valueFrom=_SECRET_KEY) | {
    "oneOf": [{"required": ["value"]}, {"required": ["valueFrom"]}]
}
_CONTAINER = record(
    "name image resources",
    name=TEXT,
    image=TEXT,
    env=items(_VARIABLE),
    resources=record("limits requests", limits=QUANTITIES, requests=QUANTITIES),
    volumeMounts=items(record("name mountPath", name=TEXT, mountPath=TEXT, readOnly=FLAG)),
)
_VOLUME = record(
    "name",
    name=TEXT,
    persistentVolumeClaim=record("claimName", claimName=TEXT, readOnly=FLAG),
    emptyDir=record(medium={"enum": ["", "Memory"]}, sizeLimit=QUANTITIES["additionalProperties"]),
    secret=record("secretName", secretName=TEXT, optional=FLAG),
) | {"minProperties": 2, "maxProperties": 2}
_POD = record("spec", spec=record("containers", containers=items(_CONTAINER), volumes=items(_VOLUME)))
_WORKERS = record(
    "groupName minReplicas maxReplicas rayStartParams template",
    groupName=TEXT,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    rayStartParams=TEXTS,
    template=_POD,
)
_CLUSTER = record(
    "headGroupSpec",
    rayVersion=TEXT,
    authOptions=record("mode", mode={"enum": ["token", "disabled"]}),
    enableInTreeAutoscaling=FLAG,
    autoscalerOptions=record(idleTimeoutSeconds=COUNT),
    headGroupSpec=record("rayStartParams template", rayStartParams=TEXTS, template=_POD),
    workerGroupSpecs=items(_WORKERS),
)
_JOB = record(
    "entrypoint rayClusterSpec",
    entrypoint=TEXT,
    runtimeEnvYAML=TEXT,
    submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
    backoffLimit=COUNT,
    shutdownAfterJobFinishes=FLAG,
    ttlSecondsAfterFinished=COUNT,
    rayClusterSpec=_CLUSTER,
)
_SERVICE = record("serveConfigV2 rayClusterConfig", serveConfigV2=TEXT, rayClusterConfig=_CLUSTER)


def _resource(kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    return record(
        "apiVersion kind metadata spec",
        apiVersion={"const": "ray.io/v1"},
        kind={"const": kind},
        metadata=record("name", name={"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}),
        spec=spec,
    )


SCHEMAS = {
    kind: _resource(kind, spec)
    for kind, spec in {"RayCluster": _CLUSTER, "RayJob": _JOB, "RayService": _SERVICE}.items()
}
"""By kind."""
