class RLinfSource:
    @staticmethod
    def exists(d): return False
def write_rlinf(*a): raise NotImplementedError
