-- Raises the fence counter. KEYS: counter; ARGV: fence.
raise(KEYS[1], tonumber(ARGV[1]))
return 1
