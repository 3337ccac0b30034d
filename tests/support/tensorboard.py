"""The contents of TensorBoard's files, without TensorBoard."""

import struct


def scalars(folder):
    """(name, step) -> value in all event files of a folder, in the order of their names."""
    from tensorboardX.proto.event_pb2 import Event

    found = {}
    for path in sorted(folder.glob("events.*")):
        data = path.read_bytes()
        while data:  # length, its checksum, the event, its checksum
            (size,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + size])
            found |= {(x.tag, event.step): x.simple_value for x in event.summary.value}
            data = data[16 + size :]
    return found
