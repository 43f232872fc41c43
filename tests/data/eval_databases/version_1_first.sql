BEGIN TRANSACTION;
CREATE TABLE attempts (
    job_id TEXT NOT NULL REFERENCES jobs (id),
    number INTEGER NOT NULL,
    began_at REAL NOT NULL,
    ended_at REAL,
    outcome TEXT,
    pid INTEGER,
    started INTEGER,
    boot TEXT,
    gpus TEXT,
    directory TEXT,
    PRIMARY KEY (job_id, number)
);
INSERT INTO "attempts" VALUES('4fdbf27e0f9aea99',1,1.7954685898963418007e+09,1.79546859209400653839e+09,'completed',15520,225605,'00000000-0000-4000-8000-000000000000','[0]','{DIRECTORY}/work/jobs/4fdbf27e0f9aea99/1');
INSERT INTO "attempts" VALUES('448b7c8dea893107',1,1.79546859241215062139e+09,1.79546859373141026502e+09,'completed',15523,225856,'00000000-0000-4000-8000-000000000000','[0]','{DIRECTORY}/work/jobs/448b7c8dea893107/1');
INSERT INTO "attempts" VALUES('edb07d5bb26b0e79',1,1.7954685938087129593e+09,1.79546859470901036268e+09,'failed',15548,225992,'00000000-0000-4000-8000-000000000000','[0]','{DIRECTORY}/work/jobs/edb07d5bb26b0e79/1');
INSERT INTO "attempts" VALUES('99c1d0f8816c9f4d',1,1.79546859483940577512e+09,1.79546859572238826745e+09,'failed',15553,226092,'00000000-0000-4000-8000-000000000000','[0]','{DIRECTORY}/work/jobs/99c1d0f8816c9f4d/1');
INSERT INTO "attempts" VALUES('edb07d5bb26b0e79',2,1.79546859580340957638e+09,1.79546859650916051866e+09,'failed',15557,226188,'00000000-0000-4000-8000-000000000000','[0]','{DIRECTORY}/work/jobs/edb07d5bb26b0e79/2');
INSERT INTO "attempts" VALUES('8ab3db2ae65ec2eb',1,1.79546859664568829537e+09,NULL,NULL,15581,226273,'00000000-0000-4000-8000-000000000000','[0]','{DIRECTORY}/work/jobs/8ab3db2ae65ec2eb/1');
CREATE TABLE events (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    job_id TEXT NOT NULL,
    status TEXT NOT NULL,
    phase TEXT,
    at REAL NOT NULL
);
INSERT INTO "events" VALUES(1,'4fdbf27e0f9aea99','queued',NULL,1.79546858982305431364e+09);
INSERT INTO "events" VALUES(2,'4fdbf27e0f9aea99','running','merging',1.7954685898963418007e+09);
INSERT INTO "events" VALUES(3,'4fdbf27e0f9aea99','running','evaluating',1.795468590140017271e+09);
INSERT INTO "events" VALUES(4,'4fdbf27e0f9aea99','completed',NULL,1.79546859209400653839e+09);
INSERT INTO "events" VALUES(5,'448b7c8dea893107','queued',NULL,1.79546859235871505739e+09);
INSERT INTO "events" VALUES(6,'448b7c8dea893107','running','merging',1.79546859241215062139e+09);
INSERT INTO "events" VALUES(7,'448b7c8dea893107','running','evaluating',1.7954685925721421242e+09);
INSERT INTO "events" VALUES(8,'448b7c8dea893107','completed',NULL,1.79546859373141026502e+09);
INSERT INTO "events" VALUES(9,'edb07d5bb26b0e79','queued',NULL,1.7954685937971217632e+09);
INSERT INTO "events" VALUES(10,'edb07d5bb26b0e79','running','merging',1.7954685938087129593e+09);
INSERT INTO "events" VALUES(11,'edb07d5bb26b0e79','running','evaluating',1.79546859389198637003e+09);
INSERT INTO "events" VALUES(12,'edb07d5bb26b0e79','failed',NULL,1.79546859470901036268e+09);
INSERT INTO "events" VALUES(13,'99c1d0f8816c9f4d','queued',NULL,1.79546859481820893287e+09);
INSERT INTO "events" VALUES(14,'99c1d0f8816c9f4d','running','merging',1.79546859483940577512e+09);
INSERT INTO "events" VALUES(15,'99c1d0f8816c9f4d','running','evaluating',1.7954685948848569393e+09);
INSERT INTO "events" VALUES(16,'99c1d0f8816c9f4d','failed',NULL,1.79546859572238826745e+09);
INSERT INTO "events" VALUES(17,'edb07d5bb26b0e79','queued',NULL,1.79546859578835320478e+09);
INSERT INTO "events" VALUES(18,'edb07d5bb26b0e79','running','merging',1.79546859580340957638e+09);
INSERT INTO "events" VALUES(19,'edb07d5bb26b0e79','running','evaluating',1.79546859586394572257e+09);
INSERT INTO "events" VALUES(20,'edb07d5bb26b0e79','failed',NULL,1.79546859650916051866e+09);
INSERT INTO "events" VALUES(21,'8ab3db2ae65ec2eb','queued',NULL,1.79546859663537192348e+09);
INSERT INTO "events" VALUES(22,'8ab3db2ae65ec2eb','running','merging',1.79546859664568829537e+09);
INSERT INTO "events" VALUES(23,'8ab3db2ae65ec2eb','running','evaluating',1.79546859669730901718e+09);
INSERT INTO "events" VALUES(24,'0a7cfbb11a4b4609','queued',NULL,1.7954685967861404419e+09);
INSERT INTO "events" VALUES(25,'52651fc1c5175471','queued',NULL,1.7954685968266465664e+09);
INSERT INTO "events" VALUES(26,'52651fc1c5175471','cancelled',NULL,1795468596.86019);
CREATE TABLE exports (
    job_id TEXT NOT NULL REFERENCES jobs (id),
    sink TEXT NOT NULL,
    at REAL NOT NULL,
    PRIMARY KEY (job_id, sink)
);
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    key TEXT NOT NULL UNIQUE,
    request TEXT NOT NULL,
    run TEXT NOT NULL,
    step INTEGER,
    weights TEXT NOT NULL,
    profile TEXT NOT NULL,
    status TEXT NOT NULL,
    phase TEXT,
    created_at REAL NOT NULL,
    queued_at REAL NOT NULL,
    not_before REAL NOT NULL DEFAULT 0,
    started_at REAL,
    completed_at REAL,
    pin TEXT,
    attempts INTEGER NOT NULL DEFAULT 0,
    failures INTEGER NOT NULL DEFAULT 0,
    error TEXT,
    results TEXT
);
INSERT INTO "jobs" VALUES(1,'4fdbf27e0f9aea99','0e8d6a554636a323b3c92e0aace90381','{"checkpoint": "{DIRECTORY}/root/my-run/checkpoint-100", "profile": "script", "tasks": ["score"], "step": 100, "run": "my-run", "weights": "model", "model_args": {}, "num_fewshot": null, "batch_size": null, "limit": null, "gen_kwargs": null, "num_gpus": null, "fingerprint": "449d943673589bdc"}','my-run',100,'model','script','completed',NULL,1.79546858982305431364e+09,1.79546858982305431364e+09,0.0,1.7954685898963418007e+09,1.79546859209413099288e+09,'{DIRECTORY}/root/my-run/_unshard/pins/3476c8ac892682f0/checkpoint-100',1,0,NULL,'{DIRECTORY}/work/jobs/4fdbf27e0f9aea99/1/output/results.json');
INSERT INTO "jobs" VALUES(2,'448b7c8dea893107','ce899c6b0ea7e9b8d2a3932c038cc150','{"checkpoint": "{DIRECTORY}/root/my-run/checkpoint-200", "profile": "script", "tasks": ["errors"], "step": 200, "run": "my-run", "weights": "model", "model_args": {}, "num_fewshot": null, "batch_size": null, "limit": null, "gen_kwargs": null, "num_gpus": null, "fingerprint": "b0723df541520ea4"}','my-run',200,'model','script','completed',NULL,1.79546859235871505739e+09,1.79546859235871505739e+09,0.0,1.79546859241215062139e+09,1.79546859373153066628e+09,'{DIRECTORY}/root/my-run/_unshard/pins/cbb66681fa06d6c1/checkpoint-200',1,0,NULL,'{DIRECTORY}/work/jobs/448b7c8dea893107/1/output/results.json');
INSERT INTO "jobs" VALUES(3,'edb07d5bb26b0e79','ed0203f5c566ac78452fe8218385f089','{"checkpoint": "{DIRECTORY}/root/my-run/checkpoint-300", "profile": "script", "tasks": ["fails"], "step": 300, "run": "my-run", "weights": "model", "model_args": {}, "num_fewshot": null, "batch_size": null, "limit": null, "gen_kwargs": null, "num_gpus": null, "fingerprint": "c1decfbd6a352336"}','my-run',300,'model','script','failed',NULL,1.7954685937971217632e+09,1.79546859578835320478e+09,0.0,1.79546859580340957638e+09,1.79546859650914883616e+09,'{DIRECTORY}/root/my-run/_unshard/pins/1dcaeb69432bb9b5/checkpoint-300',2,1,'script failed
  found:    exit code 1
  hint:     the log of the job says why
The log ends with:
nothing was measured',NULL);
INSERT INTO "jobs" VALUES(4,'99c1d0f8816c9f4d','91a7a777595512a595d1c36de90a51ce','{"checkpoint": "{DIRECTORY}/root/my-run/checkpoint-250", "profile": "script", "tasks": ["fails"], "step": 250, "run": "my-run", "weights": "model", "model_args": {}, "num_fewshot": null, "batch_size": null, "limit": null, "gen_kwargs": null, "num_gpus": null, "fingerprint": "36e36d2552eb5f59"}','my-run',250,'model','script','failed',NULL,1.79546859481820893287e+09,1.79546859481820893287e+09,0.0,1.79546859483940577512e+09,1.79546859572237658495e+09,'{DIRECTORY}/root/my-run/_unshard/pins/28d1df4092035acb/checkpoint-250',1,1,'script failed
  found:    exit code 1
  hint:     the log of the job says why
The log ends with:
nothing was measured',NULL);
INSERT INTO "jobs" VALUES(5,'8ab3db2ae65ec2eb','705d958f0c1789b15ac8ed4ef8ec7e48','{"checkpoint": "{DIRECTORY}/root/my-run/checkpoint-400", "profile": "script", "tasks": ["waits"], "step": 400, "run": "my-run", "weights": "model", "model_args": {}, "num_fewshot": null, "batch_size": null, "limit": null, "gen_kwargs": null, "num_gpus": null, "fingerprint": "272c3867b38559b4"}','my-run',400,'model','script','running','evaluating',1.79546859663537192348e+09,1.79546859663537192348e+09,0.0,1.79546859664568829537e+09,NULL,'{DIRECTORY}/root/my-run/_unshard/pins/ba7a900133ab1ac4/checkpoint-400',1,0,NULL,NULL);
INSERT INTO "jobs" VALUES(6,'0a7cfbb11a4b4609','fb4a32a284d06c38ca5afc11ba7c1275','{"checkpoint": "{DIRECTORY}/root/my-run/checkpoint-500", "profile": "script", "tasks": ["score"], "step": 500, "run": "my-run", "weights": "model", "model_args": {}, "num_fewshot": null, "batch_size": null, "limit": null, "gen_kwargs": null, "num_gpus": null, "fingerprint": "1f4a1fe9ca996e9a"}','my-run',500,'model','script','queued',NULL,1.7954685967861404419e+09,1.7954685967861404419e+09,0.0,NULL,NULL,'{DIRECTORY}/root/my-run/_unshard/pins/c56150eee5b98379/checkpoint-500',0,0,NULL,NULL);
INSERT INTO "jobs" VALUES(7,'52651fc1c5175471','e908b87d3fe21351b1d9ee552d861017','{"checkpoint": "{DIRECTORY}/root/my-run/checkpoint-600", "profile": "script", "tasks": ["score"], "step": 600, "run": "my-run", "weights": "model", "model_args": {}, "num_fewshot": null, "batch_size": null, "limit": null, "gen_kwargs": null, "num_gpus": null, "fingerprint": "a0c4d4b5e17dbbaa"}','my-run',600,'model','script','cancelled',NULL,1.7954685968266465664e+09,1.7954685968266465664e+09,0.0,NULL,1.7954685968600969314e+09,'{DIRECTORY}/root/my-run/_unshard/pins/99815eac0cfbf292/checkpoint-600',0,0,NULL,NULL);
CREATE TABLE results (
    job_id TEXT NOT NULL REFERENCES jobs (id),
    metric TEXT NOT NULL,
    value REAL NOT NULL,
    PRIMARY KEY (job_id, metric)
);
INSERT INTO "results" VALUES('4fdbf27e0f9aea99','score/acc',1.0);
INSERT INTO "results" VALUES('4fdbf27e0f9aea99','score/size',12.0);
INSERT INTO "results" VALUES('448b7c8dea893107','errors/acc',2.0);
INSERT INTO "results" VALUES('448b7c8dea893107','errors/size',12.0);
CREATE INDEX jobs_by_status ON jobs (status, queued_at, number);
CREATE UNIQUE INDEX one_open_attempt ON attempts (job_id) WHERE ended_at IS NULL;
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('jobs',7);
INSERT INTO "sqlite_sequence" VALUES('events',26);
COMMIT;
PRAGMA application_id = 0;
PRAGMA user_version = 1;
