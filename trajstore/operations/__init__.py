"""Operations on directories: inspect, verify, copy, repair and others."""
