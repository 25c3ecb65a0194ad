-- Puts a lock that a majority of the other nodes has just renewed onto a node that does not have it. KEYS: L, V, counter;
-- ARGV: attempt, ttl in ms, fence, V as another node has it.
raise(KEYS[3], tonumber(ARGV[3]))
if not redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return 0 end
redis.call('SET', KEYS[2], ARGV[4], 'PX', ARGV[2])
return 1
