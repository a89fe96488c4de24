"""Uploads to S3 with one PUT, or in parts when large; with conditions or without."""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from trajstore.remote.answers import ConflictError

logger = logging.getLogger(__name__)

ONE_PUT = 128 << 20
"""Largest object in bytes that is written with one PUT. S3 refuses more than 5 GiB; long before that, repeating a
failed request costs more than parts do."""

PART = 64 << 20
MOST_PARTS = 10_000
LARGEST_PART = 5 << 30
"""S3's limits."""

_AT_ONCE = 4


def upload(filesystem: Any, path: str, data: bytes, **condition: str) -> str:
    """Write an object, if a condition holds; return its ETag.

    A multipart upload checks the condition when it is completed, and shows nothing before. The condition is also
    checked just before, for servers that enforce conditions on PUT only.

    Args:
        filesystem: of s3fs.
        path: bucket and key.
        data: the whole content.
        condition: ``IfMatch`` or ``IfNoneMatch``, or none.

    Raises:
        OSError: the condition failed (a :class:`ConflictError`, or the client's own error), the data is too large, or
            the store cannot be reached.
    """
    bucket, key, _ = filesystem.split_path(path)
    if len(data) <= ONE_PUT:
        answer = filesystem.call_s3("put_object", Bucket=bucket, Key=key, Body=data, **condition)
        return str(answer["ETag"])
    size = max(PART, -(-len(data) // MOST_PARTS))
    if size > LARGEST_PART:
        raise OSError(errno.EFBIG, f"{len(data):,} bytes; an object of S3 has at most {MOST_PARTS * LARGEST_PART:,}")
    upload_id = filesystem.call_s3("create_multipart_upload", Bucket=bucket, Key=key)["UploadId"]
    about = {"Bucket": bucket, "Key": key, "UploadId": upload_id}
    try:
        with ThreadPoolExecutor(_AT_ONCE, "trajstore-upload") as pool:
            work = partial(_part, filesystem, about, memoryview(data), size)
            parts = list(pool.map(work, range(-(-len(data) // size))))
        _check(filesystem, bucket, key, condition)
        answer = filesystem.call_s3("complete_multipart_upload", **about, MultipartUpload={"Parts": parts}, **condition)
    except BaseException:
        try:
            filesystem.call_s3("abort_multipart_upload", **about)
        except Exception as error:  # the upload's error matters, not this one
            logger.warning(
                "%s: parts of an upload that failed may be left, and cost money; a lifecycle rule of the bucket "
                "removes them (AbortIncompleteMultipartUpload): %s",
                path,
                error,
            )
        raise
    return str(answer["ETag"])


def _check(filesystem: Any, bucket: str, key: str, condition: Mapping[str, str]) -> None:
    if not condition:
        return
    try:
        version = filesystem.call_s3("head_object", Bucket=bucket, Key=key)["ETag"]
    except FileNotFoundError:
        version = None
    if version != condition.get("IfMatch"):
        raise ConflictError(errno.EBUSY, "it has changed")


def _part(filesystem: Any, about: dict[str, str], data: memoryview, size: int, number: int) -> dict[str, Any]:
    body = bytes(data[number * size : (number + 1) * size])
    answer = filesystem.call_s3("upload_part", **about, PartNumber=number + 1, Body=body)
    return {"PartNumber": number + 1, "ETag": answer["ETag"]}
